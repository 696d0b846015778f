"""python -m kvlab.hf capture|features|sensitivities

capture makes a trace from a transformers model; features and sensitivities add data to a finished trace. Bad input
exits with status 2 and one line on stderr.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from kvlab.hf.refused import Refused, one_line

COMMANDS = {"capture": "capture_command", "features": "features", "sensitivities": "sensitivities"}


def main(argv: Sequence[str]) -> int:
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    if name not in COMMANDS:
        print(f"kvlab.hf: unknown command {name!r}; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        code: int = importlib.import_module(f"kvlab.hf.{COMMANDS[name]}").main(argv[1:])
        return code
    except ImportError as missing:
        what = f"cannot import {missing.name}: pip install torch transformers"
    except Refused as error:
        what = one_line(error.line)
    except OSError as error:
        what = one_line(error)
    print(f"kvlab.hf {name}: {what}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
