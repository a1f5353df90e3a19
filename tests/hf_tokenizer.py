"""A tokenizer as Hugging Face has it, learned here."""

import json
import sysconfig
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Reader

STDLIB = Path(sysconfig.get_paths()["stdlib"])
CODE = [p.read_text(errors="replace") for p in sorted(STDLIB.glob("*.py"))[:40]]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_folder(folder: Path) -> Path:
    """A folder as Hugging Face has it: tokenizer.json (byte-level BPE, learned from code), tokenizer_config.json."""
    reader = Reader(models.BPE())
    reader.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reader.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    reader.train_from_iterator(CODE, trainer)
    reader.add_tokens([AddedToken("<think>", special=False)])
    reader.save(str(folder / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    about = {"bos_token": None, "eos_token": eos, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder
