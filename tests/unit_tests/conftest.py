import pytest

from tests.hf_tokenizer import make_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder of a tokenizer as Hugging Face has it."""
    return make_folder(tmp_path_factory.mktemp("hf"))
