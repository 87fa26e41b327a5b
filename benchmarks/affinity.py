"""The CPU time of a choice of an endpoint: `python -m benchmarks.affinity`.

All endpoints are available, serve the model, and have requests in flight.
"""

import random
import time

from responses_mw.protocol.dialects import VLLM
from responses_mw.upstream.affinity import session_key
from responses_mw.upstream.discovery import Address
from responses_mw.upstream.pool import Pool, Wanted

TARGETS = {2: 8.0, 8: 8.0, 64: 40.0}
"""Maximum time of a choice in microseconds, by the number of endpoints."""
CHOICES, ROUNDS = 5_000, 7


def microseconds(endpoints: int, wanted: Wanted, sessions: list[str]) -> float:
    """Return the CPU time of a choice among `endpoints`, in the fastest of several rounds."""
    pool = Pool("vllm")
    pool.update([Address(f"http://10.0.0.{number}:8000", "vllm:8000", "") for number in range(endpoints)])
    rounds = []
    for _ in range(ROUNDS):
        for endpoint in pool.endpoints:
            endpoint.models = {"model": {}}
            endpoint.in_flight = random.randrange(20)
        began = time.process_time()
        for session in sessions:
            pool.choose(session, wanted)
        rounds.append((time.process_time() - began) / len(sessions) * 1e6)
    return min(rounds)


def main() -> None:
    """Print one line for each number of endpoints."""
    sessions = [session_key(str(number)) for number in range(CHOICES)]
    wanted = Wanted("model", VLLM)
    print(f"CPU time of a choice in microseconds, fastest of {ROUNDS} rounds of {CHOICES:,} choices")
    for endpoints, target in TARGETS.items():
        with_session = microseconds(endpoints, wanted, sessions)
        without = microseconds(endpoints, wanted, [""] * CHOICES)
        verdict = "ok" if with_session < target else "TOO SLOW"
        print(
            f"{endpoints:3} endpoints: {with_session:5.1f} with a session (below {target:g}: {verdict}), {without:5.1f} without"
        )


if __name__ == "__main__":
    main()
