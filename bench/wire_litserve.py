"""An empty handler behind LitServe: `python bench/wire_litserve.py PORT`.

In a file of its own, because LitServe's worker process imports the class by its module.
"""

from __future__ import annotations

import sys
from typing import Any

import litserve


class Nothing(litserve.LitAPI):  # type: ignore[misc]
    """Answers each request with nothing."""

    def setup(self, device: str) -> None:
        """There is no model."""

    def predict(self, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return {"outputs": output}


if __name__ == "__main__":
    api = Nothing(api_path="/generate")
    served = litserve.LitServer(api, accelerator="cpu", timeout=60)
    served.run(
        "127.0.0.1",
        int(sys.argv[1]),
        log_level="error",
        generate_client_file=False,
        timeout_keep_alive=600,
    )
