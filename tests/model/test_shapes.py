"""What a family's constants mean for the model that is built: each of these is met by few folders or layouts."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from lockstep import build_model
from lockstep.config import TrainConfig
from lockstep.errors import UserError
from lockstep.model import Decoder, preset
from lockstep.model.families.rope import _part
from lockstep.model.families.windows import windows_if_used
from lockstep.parallel.compile import _one_of_each_kind
from lockstep.parallel.pipeline_stage import Stage
from lockstep.parallel.placements import parameter_placement
from lockstep.train import Trainer

STAGES = [range(2), range(2, 4)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(qk_norm="heads"), "qk_norm is 'heads'; it must be one of none, head, all heads"),
        (dict(activation="gelu"), "activation is 'gelu'; it must be one of silu, gelu_tanh, relu_squared"),
        (dict(fused=("kv_proj",)), "fused has kv_proj; it can have gate_up_proj, qkv_proj"),
        (dict(rotated_features=64), "rotated_features is 64; it must be 0 for all, or up to head_dim, 32"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(changes, said):
    with pytest.raises(UserError, match=said):
        replace(preset("llama3:micro"), **changes)


def test_windows_begin_at_max_window_layers():
    keys = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    assert windows_if_used(keys, "") == {"windows": (0, 20, 20)}


def test_a_factor_gives_the_features_that_it_was_made_from():
    assert all(int(width * _part(part, width)) == part for width in range(2, 130, 2) for part in range(2, width, 2))


def test_embeddings_are_scaled_by_a_number_of_the_models_dtype():
    shape = replace(preset("gemma3:1b"), num_layers=1)  # of width 1152, whose root is 33.94
    assert Decoder(shape, torch.bfloat16, "meta").embedding_scale == 34.0


def test_the_ones_of_norms_without_weights_are_not_trained():
    trainer = Trainer(build_model(preset("nanochat:micro"), "bfloat16"), TrainConfig(), 1)
    assert [name for name in trainer.optimizer.parameters if "norm" in name] == []


def test_a_pipelines_later_stages_have_their_layers_rotation_and_no_embedding():
    later = Stage(preset("olmo3:micro"), torch.float32, 1, STAGES)
    assert [block.rope for block in later.layers] == [1, 0]
    names = [name for name, _ in Stage(preset("nanochat:micro"), torch.float32, 1, STAGES).named_parameters()]
    assert names and not any("embed" in name for name in names)


def test_layers_that_do_not_rotate_are_compiled_for_themselves():
    assert len(_one_of_each_kind(Decoder(preset("smollm3:micro"), torch.float32, "meta"))) == 2


@pytest.mark.parametrize(("layer", "placement"), [("up", Shard(0)), ("gate", Shard(0)), ("down", Replicate())])
def test_biases_of_the_feed_forward_are_with_the_outputs_that_they_are_added_to(layer, placement):
    shape = replace(preset("llama3:micro"), mlp_bias=True)
    assert parameter_placement(shape, f"layers.0.mlp.{layer}_proj.bias", 2) == placement
