"""`specdec quantize`: the command line of making GPTQ checkpoints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HELP = "make a GPTQ checkpoint of a model, in AutoGPTQ's format"


def add_parser(commands: Any) -> None:
    """Add the subcommand; nothing heavy is imported before it runs."""
    parser = commands.add_parser("quantize", help=HELP, description=HELP)
    parser.add_argument("--model", required=True, help="alias, folder, hub id or GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--bits", type=int, default=4, help="2, 3, 4 (default) or 8")
    parser.add_argument(
        "--group-size", type=int, default=128, help="weights of one scale; -1 = a row (default 128)"
    )
    parser.add_argument(
        "--act-order", action="store_true", help="columns of the largest inputs first (desc_act)"
    )
    signs = parser.add_mutually_exclusive_group()
    signs.add_argument(
        "--sym", action="store_true", default=True, help="grid symmetric to 0 (default)"
    )
    signs.add_argument("--asym", dest="sym", action="store_false", help="a zero point per group")
    parser.add_argument("--method", default="gptq", help="gptq (default) or rtn: round to nearest")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="UTF-8 text like what the model will see"
    )
    parser.add_argument(
        "--evaluation",
        type=Path,
        metavar="FILE",
        help="text for the perplexity (default: the last tenth of the calibration text)",
    )
    parser.add_argument("--num-samples", type=int, default=128, help="calibration rows at most")
    parser.add_argument("--sample-tokens", type=int, default=512, help="tokens of a row")
    parser.add_argument("--damping", type=float, default=0.01, help="of the Hessian's diagonal")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from specdec.quantize.gptq import Grid
    from specdec.quantize.run import quantize

    report = quantize(
        args.model,
        args.out,
        Grid(args.bits, args.group_size, args.sym, args.act_order),
        method=args.method,
        calibration=args.calibration,
        evaluation=args.evaluation,
        num_samples=args.num_samples,
        sample_tokens=args.sample_tokens,
        damping=args.damping,
        device=args.device,
        progress=not args.json,
    )
    if args.json:
        print(json.dumps(report))
        return 0
    before, after = report["perplexity_before"], report["perplexity_after"]
    quality = "perplexity not measured: no text was given"
    if before is not None:
        count = report["evaluation_tokens"]
        quality = f"perplexity {before:.3f} before, {after:.3f} after, on {count} tokens"
    print(
        f"{report['num_modules']} layers in {report['out']} ({report['weight_bytes'] / 1e6:.1f} "
        f"MB of weights, {report['seconds']:.0f} s); {quality}"
    )
    return 0
