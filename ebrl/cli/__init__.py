"""The command ``ebrl``; every error that a user can mend is one line and a status that is not 0."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from ebrl.core.errors import EbrlError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        args: Without the program's name; default: those of the process.

    Returns:
        0; 1: the run failed; 2: bad input, nothing was written; 3: target not reached; 130: interrupted.
    """
    try:
        return _dispatch(args)
    except EbrlError as error:
        _complain(error)
        return BAD_INPUT
    except ExceptionGroup as group:
        known, unknown = group.split(EbrlError)
        if unknown is not None or known is None:
            raise
        for leaf in _leaves(known):
            _complain(leaf)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _dispatch(args: Sequence[str] | None) -> int:
    import tyro  # slow to import; not needed to import the package

    from ebrl.cli.config import EvalConfig, TrainConfig
    from ebrl.cli.eval import eval_run
    from ebrl.cli.train import train

    command = tyro.extras.subcommand_cli_from_dict(
        {"train": TrainConfig, "eval": EvalConfig}, args=args, prog="ebrl", sort_subcommands=False
    )
    return train(command) if isinstance(command, TrainConfig) else eval_run(command)


def _leaves(group: BaseExceptionGroup[EbrlError]) -> Iterator[EbrlError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _complain(error: EbrlError) -> None:
    notes = [note for note in getattr(error, "__notes__", []) if "\n" not in note]
    print(" ".join(["error:", str(error), *(f"[{note}]" for note in notes)]), file=sys.stderr)
