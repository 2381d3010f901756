"""What sharing one daemon costs, and that nothing is lost by it.

    python bench/sharing.py [--quick] [--rounds N] [--json FILE]

Kill rounds: eight clients draw `shapes` (two steps) without a pause, while worker or daemon is
killed with SIGKILL at a random moment, 200 times (20 with --quick). Every accepted job has to be
delivered once, with the pixels that it has undisturbed: `jobs_accepted`, `jobs_lost`,
`jobs_duplicated`, `jobs_wrong`. Fails with 1 where one of the last three is not 0, or a job hangs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.kill_rounds import Counts, KillRounds, Load, RestartedDaemon

PROMPT = "a red circle on a white background"
STEPS = 2
PICTURES = 5


def main() -> int:
    options = _options()
    rounds = options.rounds or (20 if options.quick else 200)
    began_s = time.monotonic()
    counts = kill_rounds(rounds, options.seed)
    figures = {**counts.figures(), "rounds": rounds, "took_s": round(time.monotonic() - began_s, 1)}
    for key, value in figures.items():
        print(f"{key:20} {value}")
    for error in counts.errors:
        print(error, file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(bool(counts.lost or counts.duplicated or counts.wrong or counts.errors))


def kill_rounds(rounds: int, seed: int) -> Counts:
    """Draw while worker and daemon are killed."""
    with tempfile.TemporaryDirectory(prefix="sharing-") as folder:
        daemon = RestartedDaemon([sys.executable, "-m", "offloadd"], Path(folder))
        try:
            daemon.wait_until_ready()
            pixels = _undisturbed(daemon)
            load = Load(
                "shapes",
                _request,
                lambda number, result: result.image.tobytes() == pixels[number % PICTURES],
            )
            return KillRounds(daemon, load, seed).run(rounds, longest_wait_s=3.0)
        finally:
            daemon.stop()


def _undisturbed(daemon: RestartedDaemon) -> list[bytes]:
    with daemon.client("reference") as client:
        return [
            client.generate("shapes", **_request(number)).image.tobytes()
            for number in range(PICTURES)
        ]


def _request(number: int) -> dict[str, Any]:
    return {"prompt": PROMPT, "seed": number % PICTURES, "num_inference_steps": STEPS}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="20 rounds instead of 200")
    parser.add_argument("--rounds", type=int, help="as many rounds")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the kills")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
