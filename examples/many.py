"""Draws several pictures at once from one asyncio program: python many.py."""

from __future__ import annotations

import asyncio

from offload_client import AsyncClient, OffloadError

COLOURS = ("red", "green", "blue", "yellow")


async def draw(client: AsyncClient, colour: str) -> str:
    """One picture; an error of one job leaves the others alone."""
    job = await client.submit("shapes", f"a {colour} square on a white background", seed=7)
    try:
        result = await job
    except OffloadError as error:
        return f"{colour}: {error.code}: {error}"
    result.image.save(f"{colour}.png")
    return f"{colour}.png: waited {result.timings.queued_s:.1f} s"


async def main() -> None:
    """All of them; the daemon decides the order."""
    async with AsyncClient() as client:
        for line in await asyncio.gather(*(draw(client, colour) for colour in COLOURS)):
            print(line)


if __name__ == "__main__":
    asyncio.run(main())
