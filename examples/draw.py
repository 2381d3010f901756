"""Draws one picture and shows how far it is: python draw.py "a red circle on a blue background"."""

from __future__ import annotations

import sys

from offload_client import Client, OffloadError, Progress


def show(progress: Progress) -> None:
    """One line for each change."""
    place = "" if progress.position is None else f", place {progress.position}"
    print(f"{progress.state} {progress.step}/{progress.steps}{place}")


def main() -> None:
    """Draw, and say what it cost."""
    prompt = sys.argv[1] if len(sys.argv) > 1 else "a red circle on a white background"
    with Client() as client:
        result = client.generate("shapes", prompt, on_progress=show)
    result.image.save("picture.png")
    print(f"picture.png: seed {result.seed}, {result.timings.running_s:.1f} s")


if __name__ == "__main__":
    try:
        main()
    except OffloadError as error:
        sys.exit(f"{error.code}: {error}")
