"""Folders of small models that the commands are given."""

import shutil

import pytest

from tests.server.conftest import chat_folder  # noqa: F401

TEMPLATE = (
    "{{ 'loud:' if loud }}{{ word }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="package")
def templated_folder(tmp_path_factory, model_folder):
    """The small model with a chat template that reads the values `loud` and `word`."""
    folder = tmp_path_factory.mktemp("values") / "model"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
