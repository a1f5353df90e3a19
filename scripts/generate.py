"""Let a model speak: a checkpoint of ours or a Hugging Face folder, one process, one device.

python scripts/generate.py outputs/checkpoint/step-100 --prompt "def main(" --prompt "import "
python scripts/generate.py my_model --chat --prompt "What is a pipeline bubble?" --temperature 0.7 --top_p 0.9
"""

import argparse
import sys
from pathlib import Path

import torch

from torchtitan_wlb.config import Model
from torchtitan_wlb.config_manager import exit_on_config_error
from torchtitan_wlb.data.chat import ChatTemplate
from torchtitan_wlb.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.generation import generate
from torchtitan_wlb.initial_weights import InitialWeights
from torchtitan_wlb.logger import init_logger
from torchtitan_wlb.models.hf import resolve_model
from torchtitan_wlb.models.kernels import select_kernel
from torchtitan_wlb.models.llama import Transformer
from torchtitan_wlb.models.model_args import ModelArgs
from torchtitan_wlb.models.rotary import rotary_table
from torchtitan_wlb.run_state import FILE, read_run_state


def about(path: Path, tokenizer: str, chat_template: str) -> tuple[Model, Tokenizer, ModelArgs]:
    """What a folder holds: its model section, tokenizer and model."""
    changed = {k: v for k, v in {"tokenizer": tokenizer, "chat_template": chat_template}.items() if v}
    if (path / FILE).is_file():
        state = read_run_state(path)
        model = state.model.model_copy(update=changed)
        return model, build_tokenizer(model), state.args
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: neither a folder step-N of a run nor a Hugging Face folder")
    model = Model(flavor=str(path), tokenizer=str(path)).model_copy(update=changed)
    return model, (t := build_tokenizer(model)), resolve_model(model, t.n_ids)


def load_model(path: Path, args: ModelArgs, max_position: int, dtype: torch.dtype, device: torch.device) -> Transformer:
    """The whole model on one device."""
    kernel = select_kernel(device.type, dtype)
    with torch.device("meta"):
        model = Transformer(args, n_ids=args.n_ids, max_position=max_position, kernel=kernel)
    model.to_empty(device="cpu")
    model.tie()
    InitialWeights(str(path), args).load([model])
    model.to(device=device, dtype=dtype)
    model.rope = rotary_table(args, max_position, device)  # in fp32, as in training
    return model.eval()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder step-N of a run, or a Hugging Face folder")
    parser.add_argument("--prompt", action="append", required=True, help="once or several times")
    parser.add_argument("--chat", action="store_true", help="prompts are what a user says")
    parser.add_argument("--chat_template", default="", help="as model.chat_template")
    parser.add_argument("--tokenizer", default="", help="as model.tokenizer, if it is not where it was")
    parser.add_argument("--max_new_tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    section, tokenizer, args = about(a.path, a.tokenizer, a.chat_template)
    stop = {tokenizer.eos_id}
    if a.chat:
        template = ChatTemplate(section.chat_template, tokenizer)
        prompts = [template.prompt([{"role": "user", "content": p}]) for p in a.prompt]
        stop |= {tokenizer.special[s] for s in ("<|im_end|>", "<|eot_id|>") if s in tokenizer.special}
    else:
        begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        prompts = [begin + tokenizer.encode(p) for p in a.prompt]
    if not all(prompts):
        raise ConfigError("--prompt: empty, and the tokenizer has no begin-of-text token")
    model = load_model(a.path, args, max(map(len, prompts)) + a.max_new_tokens, dtype, device)
    said = generate(
        model,
        prompts,
        max_new_tokens=a.max_new_tokens,
        stop=[i for i in stop if i is not None],
        temperature=a.temperature,
        top_p=a.top_p,
        seed=a.seed,
    )
    for prompt, ids in zip(a.prompt, said):
        print(f"--- {prompt}\n{tokenizer.decode(ids)}")


if __name__ == "__main__":
    init_logger()
    with exit_on_config_error():
        main(sys.argv[1:])
