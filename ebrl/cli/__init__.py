"""The command ``ebrl``; every error that a user can mend is one line and a status that is not 0."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from ebrl.core.errors import ConfigError, EbrlError

FAILED, BAD_INPUT, INTERRUPTED, TERMINATED = 1, 2, 130, 143


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        args: Without the program's name; default: those of the process.

    Returns:
        0; 1: the run failed, or its replay differs; 2: bad input, nothing was written; 3: target not reached; 130:
        ended by Ctrl-C; 143: by SIGTERM.
    """
    try:
        with _interrupts_arrive():
            return _dispatch(args)
    except EbrlError as error:
        _complain(error)
        return BAD_INPUT
    except ExceptionGroup as group:
        known, unknown = group.split(EbrlError)
        if unknown is not None or known is None:
            raise
        leaves = list(_leaves(known))
        _complain(leaves[0], len(leaves) - 1)
        return FAILED
    except KeyboardInterrupt as end:
        terminated = signal.SIGTERM.name in end.args  # `ebrl.run` says so
        print("terminated" if terminated else "interrupted", file=sys.stderr)
        return TERMINATED if terminated else INTERRUPTED


def command() -> NoReturn:
    """Run the command of the shell, and leave even where a call on some thread never returns."""
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: one more would be a traceback of the interpreter
    if any(thread.name.startswith("ebrl-") for thread in threading.enumerate()):
        # Given up and named in the log. The interpreter's own end would tear it down inside a library, and abort.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _dispatch(args: Sequence[str] | None) -> int:
    with _interrupts_end_at_once():
        import tyro  # slow to import; not needed to import the package

        from ebrl.cli.config import EvalConfig, ProbeConfig, ReplayConfig, TrainConfig
        from ebrl.cli.eval import eval_run
        from ebrl.cli.probe import probe
        from ebrl.cli.replay import replay_run
        from ebrl.cli.train import train

    commands: dict[str, Callable[..., Any]] = {
        "train": TrainConfig,
        "eval": EvalConfig,
        "probe": ProbeConfig,
        "replay": ReplayConfig,
    }
    _refuse_options_of_resumed(sys.argv[1:] if args is None else args)
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            command = tyro.extras.subcommand_cli_from_dict(commands, args=args, prog="ebrl", sort_subcommands=False)
    except SystemExit as end:
        error = _reason(end)
        if error is not None:  # a value out of range: our own line instead of a box of its parser
            raise error from None
        print(shown.getvalue(), end="", file=sys.stderr)
        raise
    if isinstance(command, ProbeConfig):
        return probe(command)
    if isinstance(command, ReplayConfig):
        return replay_run(command)
    if isinstance(command, TrainConfig):
        return train(command)
    return eval_run(command)


def _refuse_options_of_resumed(words: Sequence[str]) -> None:
    """Refuse what a resumed run has of its own, before anything is made of it: it would be checked beside defaults."""
    given = [word.split("=")[0] for word in words if word.startswith("--")]
    own = [option for option in given if option not in ("--resume", "--updates")]
    if "--resume" in given and own and "--help" not in own:
        raise ConfigError(f"--resume goes on with the configuration of the run: leave out {', '.join(own)}")


@contextlib.contextmanager
def _interrupts_arrive() -> Iterator[None]:
    """Deliver a Ctrl-C again that came inside a finalizer or the callback of a weak reference.

    The interpreter prints and forgets what is raised there, and importing runs many of them.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            # From another thread: in this one it would be raised before this function has returned, and lost again.
            threading.Timer(0.01, os.kill, [os.getpid(), signal.SIGINT]).start()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def _interrupts_end_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process: while libraries are imported nothing has begun that would have to be ended well.

    Some of them, torch among them, turn a KeyboardInterrupt that comes meanwhile into an error of their own.
    """

    def end(number: int, frame: object) -> None:
        os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # somebody else answers for it
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leaves(group: BaseExceptionGroup[EbrlError]) -> Iterator[EbrlError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _reason(error: BaseException | None) -> EbrlError | None:
    """Return the error of ours because of which another one was raised."""
    while error is not None and not isinstance(error, EbrlError):
        error = error.__cause__ or error.__context__
    return error


def _complain(error: EbrlError, num_others: int = 0) -> None:
    notes = [note for note in getattr(error, "__notes__", []) if "\n" not in note]
    others = [f"(and {num_others} more)"] if num_others else []
    text = " ".join(["error:", str(error), *(f"[{note}]" for note in notes), *others])
    print(" ".join(text.split()), file=sys.stderr)
