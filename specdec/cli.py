"""The command `specdec`: generate, chat, distill, quantize, info."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specdec
from specdec.distill.command import add_parser as add_distill
from specdec.quantize.command import add_parser as add_quantize

if TYPE_CHECKING:
    from specdec.config import SamplingParams

GENERATE_HELP = "answer a prompt, a file or standard input"
CHAT_HELP = "talk to the model; the prefix cache keeps earlier turns"
INFO_HELP = "devices, versions, attention backends and what auto would choose"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors are one line on stderr unless --debug."""
    args = _parser().parse_args(argv)
    _quiet_libraries(args.debug)
    try:
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except KeyboardInterrupt:
        print("\nspecdec: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if args.debug:
            raise
        print(f"specdec: error: {_one_line(error)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specdec",
        description="Lossless speculative decoding on paged attention.",
    )
    parser.add_argument("--version", action="version", version=f"specdec {specdec.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help=GENERATE_HELP, description=GENERATE_HELP)
    generate.add_argument("prompt", nargs="?", help="the prompt; - or nothing reads standard input")
    generate.add_argument(
        "--file", type=Path, help="text file (one prompt) or .jsonl with a 'prompt' a line"
    )
    generate.add_argument(
        "--raw", action="store_true", help="continue the text as it is: no chat template"
    )
    generate.add_argument(
        "--mark", action="store_true", help="show accepted, recovered and bonus tokens"
    )
    generate.add_argument(
        "--no-stream", action="store_true", help="print the text when it is complete"
    )
    generate.add_argument(
        "--no-stats", action="store_true", help="leave out the figures at the end"
    )
    _add_common(generate)
    generate.set_defaults(run=_generate)
    chat = commands.add_parser("chat", help=CHAT_HELP, description=CHAT_HELP)
    _add_common(chat)
    chat.set_defaults(run=_chat)
    add_distill(commands)
    add_quantize(commands)
    info = commands.add_parser("info", help=INFO_HELP, description=INFO_HELP)
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument("--debug", action="store_true", help="show a traceback on errors")
    info.set_defaults(run=_info)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target", help="alias, folder, hub id or GGUF file (default: smollm2-135m)"
    )
    models.add_argument(
        "--draft", help="the same for a draft model; without one, drafts come from the text"
    )
    models.add_argument("-k", "--num-draft-tokens", type=int, help="lookahead; 0 = plain decoding")
    models.add_argument("--proposer", help="auto, draft_model, ngram, hybrid, none or a plugin")
    models.add_argument(
        "--acceptance", help="acceptance rule: rejection, greedy, or a plugin's name"
    )
    models.add_argument(
        "--attention", help="auto, reference, flash_attn, triton, or a plugin's name"
    )
    models.add_argument("--device", help="auto, cpu, cuda, cuda:1, ...")
    models.add_argument("--dtype", help="auto, float32, float16, bfloat16")
    models.add_argument(
        "--cpu-linear", help="auto, fp32, fp16_weight, int8_weight, bf16: weights on a CPU"
    )
    models.add_argument(
        "--quant-backend", help="auto, dequant, dense, aten_int4: what GPTQ weights run on"
    )
    models.add_argument("--load-format", help="auto, or dummy for random weights from a config")
    models.add_argument("--max-model-len", type=int, help="tokens per sequence, prompt included")
    models.add_argument("--num-blocks", type=int, help="KV blocks shared by both models")
    models.add_argument("--block-size", type=int, help="tokens per KV block, 16 to 256")
    models.add_argument("--max-num-seqs", type=int, help="sequences running at once")
    models.add_argument("--max-num-batched-tokens", type=int, help="tokens of one step")
    models.add_argument(
        "--memory-utilization", type=float, help="share of free memory to use (default 0.9)"
    )
    models.add_argument("--trust-remote-code", action="store_true", default=None)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--system", help="system message in front of the prompt")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--min-p", type=float)
    sampling.add_argument("--repetition-penalty", type=float)
    sampling.add_argument("--presence-penalty", type=float)
    sampling.add_argument("--frequency-penalty", type=float)
    sampling.add_argument("--max-tokens", type=int, help="default 256")
    sampling.add_argument("--stop", action="append", help="stop string; may be repeated")
    sampling.add_argument("--seed", type=int)
    sampling.add_argument("--n", type=int, help="samples per prompt")
    sampling.add_argument("--logprobs", type=int, help="log-probabilities, with this many best ids")
    sampling.add_argument("--ignore-eos", action="store_true", default=None)
    parser.add_argument("--json", action="store_true", help="print JSON, one object a prompt")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")


ENGINE_FIELDS = [
    "num_draft_tokens",
    "proposer",
    "acceptance",
    "attention",
    "device",
    "dtype",
    "cpu_linear",
    "quant_backend",
    "load_format",
    "max_model_len",
    "num_blocks",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "memory_utilization",
    "trust_remote_code",
]
SAMPLING_FIELDS = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "stop",
    "seed",
    "n",
    "logprobs",
    "ignore_eos",
]


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _params(args: argparse.Namespace) -> SamplingParams:
    from specdec.config import SamplingParams, build

    params: SamplingParams = build(SamplingParams, _given(args, SAMPLING_FIELDS))
    return params


def _load(args: argparse.Namespace) -> specdec.LLM:
    target = {} if args.target is None else {"target": args.target}
    return specdec.LLM(**target, draft=args.draft, **_given(args, ENGINE_FIELDS))


def _generate(args: argparse.Namespace) -> int:
    from specdec.terminal import print_marked, print_stats, print_stream

    prompts = _read_prompts(args)
    params = _params(args)
    if args.mark and (args.json or len(prompts) > 1 or params.n > 1):
        raise ValueError("--mark shows one text: leave out --json, --n and files of many prompts")
    llm = _load(args)
    encoded = [_encode(llm, prompt, args) for prompt in prompts]
    if args.json or len(prompts) > 1 or params.n > 1:
        outputs = llm.generate(encoded, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            if args.json:
                print(json.dumps({**output.as_dict(), "prompt": prompt, "engine": llm.description}))
            else:
                print(
                    "\n".join(
                        f"[{o.index}] {o.text}" if params.n > 1 else o.text for o in output.outputs
                    )
                )
    elif args.mark:
        outputs = [print_marked(llm, encoded[0], params)]
    elif args.no_stream:
        outputs = [llm.generate(encoded[0], params)]
        print(outputs[0].text)
    else:
        outputs = [print_stream(llm, encoded[0], params)]
    if not args.no_stats and not args.json:
        print_stats(llm, outputs)
    failed = [output for output in outputs if output.error]
    for output in failed:
        print(f"specdec: error: {output.request_id}: {output.error}", file=sys.stderr)
    return 1 if failed else 0


def _read_prompts(args: argparse.Namespace) -> list[str]:
    if args.file is not None:
        if args.prompt is not None:
            raise ValueError("give a prompt or --file, not both")
        try:
            text = args.file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.file} is not UTF-8 text ({error}); convert it") from None
        if args.file.suffix == ".jsonl":
            lines = enumerate(text.split("\n"), 1)
            prompts = [_prompt_of(line, i) for i, line in lines if line.strip()]
            if not prompts:
                raise ValueError(f"{args.file} holds no prompt")
            return prompts
    elif args.prompt is None or args.prompt == "-":
        if sys.stdin.isatty():
            raise ValueError("no prompt: give one, --file FILE, or pipe text in")
        text = sys.stdin.read()
    else:
        text = args.prompt
    if not text.strip():
        raise ValueError("the prompt is empty")
    return [text]


def _prompt_of(line: str, number: int) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"line {number}: needs a JSON object with a 'prompt' ({error})") from None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"line {number}: the prompt is empty or not a text")
    return prompt


def _encode(llm: specdec.LLM, prompt: str, args: argparse.Namespace) -> list[int]:
    if args.raw or not getattr(llm.tokenizer, "chat_template", None):
        if args.system:
            raise ValueError("--system needs a chat template; leave it out, or --raw off")
        return llm.encode(prompt)
    return llm.chat_token_ids([*_system(args), {"role": "user", "content": prompt}])


def _system(args: argparse.Namespace) -> list[dict[str, str]]:
    return [{"role": "system", "content": args.system}] if args.system else []


def _chat(args: argparse.Namespace) -> int:
    from specdec.terminal import print_stats, print_stream

    params = _params(args)
    if params.n > 1 or args.json:
        raise ValueError("chat shows one answer as text: leave out --n and --json")
    llm = _load(args)
    messages = _system(args)
    print("Type a message; /reset starts over, /exit or Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print_stats(llm, [])
            return 0
        if line == "/exit":
            print_stats(llm, [])
            return 0
        if line == "/reset":
            messages = _system(args)
            continue
        if not line:
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            output = print_stream(llm, llm.chat_token_ids(asked), params)
        except ValueError as error:
            print(f"specdec: {_one_line(error)} (/reset starts over)", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
            continue
        if output.error:
            print(f"specdec: the answer failed: {output.error}", file=sys.stderr)
            continue
        messages = [*asked, {"role": "assistant", "content": output.text}]


def _info(args: argparse.Namespace) -> int:
    from specdec.terminal import collect_info, print_info

    found = collect_info()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print_info(found)
    return 0


def _quiet_libraries(debug: bool) -> None:
    if debug:
        logging.basicConfig(level=logging.DEBUG)
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("specdec").setLevel(logging.CRITICAL)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    known = isinstance(error, ValueError | ImportError | OSError)
    return text if known else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    sys.exit(main())
