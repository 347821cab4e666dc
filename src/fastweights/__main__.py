"""python -m fastweights, and the command `fastweights`: Ctrl-C is answered from the first import on."""

import os
import sys

from fastweights.utils import signals


def main() -> None:
    signals.listen()
    try:
        from fastweights.cli.main import main as run  # here, so that Ctrl-C while it is imported is heard, too

        run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted.\n")
        _leave()
    except Exception:
        if not signals.asked():  # else of an import that was interrupted half way
            raise
        sys.stderr.write("error: interrupted.\n")
        _leave()
    except SystemExit as end:
        if end.code == 130:
            _leave()
        raise


def _leave() -> None:
    """End at once: all has been said and closed, and Python would wait for threads, or be killed by a late signal."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(130)


if __name__ == "__main__":
    main()
