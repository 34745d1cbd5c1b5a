"""Fuzz a server with requests drawn from its own OpenAPI description: no 5xx, no undocumented status, no other shape.

    python -m verdraft.bench.fuzz --minutes 15

The model costs nearly nothing and its context is short, so that most of the time goes into odd requests. A 4xx for a
request that the description allows is fine: some fields exclude each other, and token ids depend on the model.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from verdraft.bench.host import started
from verdraft.bench.tiny import tiny_model

FLAGS = ("--max-model-len", "192", "--max-num-seqs", "4", "--kv-blocks", "64", "--threads", "1")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)


def command(url: str, args: argparse.Namespace) -> list[str]:
    """schemathesis, for a time instead of a number of examples."""
    options = ["--checks", ",".join(CHECKS), "--max-time", str(max(1, round(60 * args.minutes)))]
    options += ["--workers", "1", "--request-timeout", "60", "--seed", str(args.seed), "--warnings", "off"]
    options += ["--suppress-health-check", "all", "--continue-on-failure"]
    tool = Path(sys.executable).parent / "schemathesis"
    return [str(tool), "run", f"{url}/openapi.json", *options]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verdraft.bench.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_model(Path(folder)))
        with started([model, *FLAGS]) as host:
            return subprocess.run(command(host.url, args), check=False, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
