"""`lockstep parity`: trainer against generator, for one model or in every layout."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lockstep.config import Arithmetic, CompileConfig, PrecisionConfig, RanksConfig
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.parallel import World


@dataclass
class ParityOptions:
    """Compare trainer and generator."""

    model: str = ""
    """Hugging Face folder, a run's folder (its newest checkpoint), or ORGANISATION/MODEL[@REVISION] of the hub."""
    matrix: Literal["none", "covering", "full"] = "none"
    """Instead of a model: compare small ones in every layout of trainer and generator that this machine can run, up to
    four processes. `full`: all combinations of settings; `covering`: enough that every pair of settings occurs."""
    output: str = "parity"
    """Folder for the matrix: parity.json, parity.png."""
    tokens: int = 4096
    """Sampled tokens to compare."""
    dtype: Annotated[str, "dtype"] = "auto"
    """`bfloat16` or `float32`; auto or empty: as in the files."""
    arithmetic: Arithmetic = "auto"
    """On a CPU: `portable`, `bf16_pairs` or `bf16_tiles`; auto: the one that the model was trained in, if known, else
    the fastest."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1` …; empty: the machine's accelerator if it has one."""
    seed: int = 0
    """Seed of the load."""
    explain: bool = False
    """If something differs, name the first layer and operator that does."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: RanksConfig = field(default_factory=RanksConfig)


def parity(options: ParityOptions) -> int:
    """Prints the comparison. Returns the exit code: 1 if anything differs."""
    from lockstep.parallel import generating_world

    if options.dtype not in ("", "auto", "bfloat16", "float32"):
        raise UserError(f'dtype is "{options.dtype}"; give auto, bfloat16 or float32')
    if bool(options.model) == (options.matrix != "none"):
        raise UserError("give either a model with --model DIR or --matrix covering (or full)")
    if options.matrix != "none":
        return _matrix(options)
    with generating_world(options.parallel, options.device) as world:
        return _one_model(options, world)


def _matrix(options: ParityOptions) -> int:
    from lockstep.parallel import refuse_ranks
    from lockstep.rl.scoring.parity_matrix import compare, run_jobs, scoring_jobs, table, write_results

    refuse_ranks("parity --matrix")
    plain = ParityOptions(matrix=options.matrix, output=options.output)
    if unused := [field.name for field in fields(plain) if getattr(plain, field.name) != getattr(options, field.name)]:
        raise UserError(f"--matrix uses its own models and settings; leave out --{', --'.join(unused)}")
    jobs = scoring_jobs(options.matrix == "covering")
    cells = compare(run_jobs(jobs), jobs)
    write_results(cells, Path(options.output))
    print(
        "log-probabilities checked / different, by layout of the trainer (rows) and dtype and layout of the generator"
    )
    print(table(cells))
    different = sum(cell.different for cell in cells)
    print(f"\n{len(cells)} pairs, {different} different; {options.output}/parity.json, {options.output}/parity.png")
    return 0 if different == 0 else 1


def _one_model(options: ParityOptions, world: World) -> int:
    from lockstep.checkpoint import folder_of_ranks, open_model
    from lockstep.model import arithmetic_of
    from lockstep.model.known_operators import refuse_unknown_operators
    from lockstep.observe import announce, start_line
    from lockstep.parallel import apply_compile
    from lockstep.rl.scoring.parity_check import check_parity

    folder = folder_of_ranks(options.model, world)
    chunks = options.parallel.reduction_chunks
    model = open_model(folder, options.dtype, options.device, options.arithmetic, world, chunks, options.precision)
    work = f"at least {options.tokens} tokens to go"
    shape = model.config
    announce("parity: " + start_line(options.model, shape, model.device, model.dtype, work, world.size))
    if world.size == 1:  # ranks use the same operators, plus collectives
        refuse_unknown_operators(model)
    apply_compile(model, options.compile)
    result, load = check_parity(model, options.tokens, options.seed)
    print(f"Bitwise identical : {result.tokens_different == 0}")
    print(f"Tokens checked    : {result.tokens_checked}")
    print(f"Tokens different  : {result.tokens_different}")
    print(f"Max delta         : {result.max_delta:e}")
    print(
        f"Arithmetic        : {arithmetic_of(model.device)}, reduction_chunks {shape.reduction_chunks}, on both sides"
    )
    print("\nload: " + ", ".join(f"{count} {name}" for name, count in load.items()))
    if options.explain:
        from lockstep.parallel.messages import from_all
        from lockstep.rl.scoring.explain import in_words

        # The difference of the first rank that has one; explaining it is a collective.
        places: list[Any] = [[result.first, result.sequence]]
        if world.size > 1:
            places = from_all(places[0])
        for first, sequence in [place for place in places if place[0]][:1]:
            print(f"first difference: {first}. {in_words(model, sequence)}")
    return 0 if result.tokens_different == 0 else 1
