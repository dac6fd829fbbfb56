"""Log requests to an endpoint and their cost, as lines of JSON to which many processes may append."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from posttrain.types import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Sum over the requests of a log."""

    requests: int = 0
    """Requests sent, including those that failed and were retried."""
    failures: int = 0
    """Those of the requests without an answer."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """In the currency of the prices."""


def cost(prompt_tokens: int, completion_tokens: int, price_in: float, price_out: float) -> float:
    """Cost of these tokens, at prices for 10^6 tokens.

    >>> cost(2_000_000, 100_000, price_in=0.5, price_out=2.0)
    1.2
    """
    return (prompt_tokens * price_in + completion_tokens * price_out) / 1e6


def record(
    log: str,
    *,
    model: str,
    status: int,
    seconds: float,
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
    price: float = 0.0,
    error: str = "",
) -> None:
    """Append one request to a log. A line is one write, so that lines of several processes do not mix."""
    line = {
        "at": round(time.time(), 3),
        "model": model,
        "status": status,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cost": price,
        "seconds": round(seconds, 3),
        "error": error,
    }
    descriptor = os.open(Path(log).expanduser(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(line) + "\n").encode())
    finally:
        os.close(descriptor)


def spent(log: str) -> Usage:
    """Sum up the requests of a log; zero if the file does not exist yet.

    Raises UserError for a line that `record` did not write.
    """
    total = dict.fromkeys(("requests", "failures", "prompt_tokens", "completion_tokens"), 0)
    price = 0.0
    path = Path(log).expanduser()
    if not path.exists():
        return Usage()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                total["requests"] += 1
                total["failures"] += bool(entry["error"])
                total["prompt_tokens"] += entry["prompt_tokens"]
                total["completion_tokens"] += entry["completion_tokens"]
                price += entry["cost"]
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{log}:{number}", "is no request to an endpoint") from None
    return Usage(**total, cost=price)
