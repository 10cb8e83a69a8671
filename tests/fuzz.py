"""`make fuzz`: damaged picture files until the count is reached; says what was wrong and how to see it again.

python tests/fuzz.py [COUNT] [SEED]
"""

import resource
import sys
import time
import warnings
from collections import Counter

from mutants import mutants

from gncprior.errors import GncpriorError
from gncprior.picture_files import read_picture

LONGEST = 2.0  # seconds of the processor for one file


def outcome(data: bytes) -> str:
    """ "read" or "refused"; anything else is a bug and raised."""
    begin = time.process_time()
    try:
        read_picture(data)
        result = "read"
    except GncpriorError as error:
        text = str(error)
        assert "\n" not in text and text.endswith("."), text
        result = "refused"
    assert time.process_time() - begin < LONGEST, "too slow"
    return result


def main(count: int, seed: int) -> int:
    warnings.simplefilter("error")
    counter: Counter[str] = Counter()
    for name, data in mutants(count, seed):
        try:
            counter[outcome(data)] += 1
        except Exception as error:  # noqa: BLE001  (all that is not ours is reported)
            counter["bugs"] += 1
            print(f"{name}: {type(error).__name__}: {error}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{count} files: {dict(counter)}, at most {peak:.0f} MB")
    return int(counter["bugs"] > 0)


if __name__ == "__main__":
    arguments = [int(a) for a in sys.argv[1:]]
    sys.exit(main(*(arguments + [100_000, 0][len(arguments) :])))
