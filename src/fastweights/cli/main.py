"""The command line: all commands, and what is said when something goes wrong.

A command's module is imported when the command is run; until then its help is read off its source, so that --help and
a mistyped command are answered without importing torch.
"""

import ast
import errno
import importlib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from fastweights import __version__
from fastweights.utils import retired, signals
from fastweights.utils.console import say
from fastweights.utils.errors import UserError, did_you_mean

PANELS = {
    "Use": {
        "learn": "classifier",
        "predict": "classifier",
        "add": "classifier",
        "forget": "classifier",
        "inspect": "classifier",
        "export": "classifier",
        "serve": "serve",
        "demo": "demo",
        "models": "models",
        "evaluate": "evaluate",
        "compare": "compare",
        "episodes": "evaluate",
    },
    "Train": {"train": "train", "recipe": "models", "data": "data", "pack": "classifier"},
    "Research": {
        "bench": "bench",
        "search": "experiments",
        "reproduce": "experiments",
        "oracle": "oracle",
        "report": "experiments",
        "results": "experiments",
    },
}
"""The commands as --help groups them, and the module of each."""
MODULES = {command: module for commands in PANELS.values() for command, module in commands.items()}
PRINTING = ("models", "recipe", "data", "results", "inspect", "predict", "evaluate", "episodes", "report")
"""Commands that are there for what they print."""
GROUPS = ("data", "results")
"""Those of them that have commands of their own: a `typer.Typer` of that name in their module."""


class Interrupted(Exception):
    """Ctrl-C where nothing was listening for it."""


class ReaderGone(Exception):
    """Nobody reads what is printed any more: `fastweights models | head -1`."""


class Suggesting(TyperGroup):
    """Suggests a command for a mistyped one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names = self.list_commands(ctx)
        if not args[0].startswith("-") and args[0] not in names:
            near = did_you_mean(args[0], names)
            raise UserError(f"there is no command {args[0]!r}{near}; see {ctx.command_path} --help.")
        return super().resolve_command(ctx, args)


class Commands(Suggesting):
    """Imports a command when it is run, and lets Ctrl-C reach `main`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with a command's name, panel and help."""
        panel = next((panel for panel, commands in PANELS.items() if cmd_name in commands), None)
        return panel and TyperCommand(cmd_name, help=help_of(cmd_name), rich_help_panel=panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, loaded(name), rest

    def make_context(self, *about: Any, **extra: Any) -> Any:
        with telling_apart():
            return super().make_context(*about, **extra)

    def invoke(self, ctx: Any) -> Any:
        with telling_apart():
            return super().invoke(ctx)


@contextmanager
def telling_apart() -> Iterator[None]:
    """Hand on what typer would end with exit code 1 for, without a word."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted from None
    except BrokenPipeError:
        raise ReaderGone from None


def help_of(command: str) -> str:
    """The docstring of a command's function, or the help of its group, read off the source."""
    tree = ast.parse(Path(__file__).with_name(f"{MODULES[command]}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == command:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == command:
            assert isinstance(node.value, ast.Call)
            return next(ast.literal_eval(word.value) for word in node.value.keywords if word.arg == "help")
    return ""


def loaded(command: str) -> Any:
    """The command itself."""
    found = getattr(importlib.import_module(f"fastweights.cli.{MODULES[command]}"), command)
    signals.require_none()
    if command in GROUPS:
        found.info.cls = Suggesting
    else:
        function, found = found, typer.Typer(add_completion=False)
        found.command(command)(function)
    return typer.main.get_command(found)


app = typer.Typer(
    cls=Commands,
    help="Learning from one example with Hebbian fast weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"fastweights {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Learning from one example with Hebbian fast weights."""


def main() -> None:
    """Run the command line; every failure that a user can cause is one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where ± cannot be printed, a question mark can
    Console.on_broken_pipe = _reader_has_gone  # type: ignore  # rich would exit with code 1
    warnings.showwarning = _noted  # type: ignore[assignment]
    try:
        code = app(standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a failure can be told
        sys.exit(code)
    except UserError as error:
        _fail(str(error), 2)
    except (BrokenPipeError, ReaderGone):
        _let_go_of(sys.stdout)
        sys.exit(0 if _only_prints(sys.argv) else 141)
    except OSError as error:
        _let_go_of(sys.stdout)
        _fail(_in_words(error), 2)
    except (KeyboardInterrupt, Interrupted, typer.Abort):
        _fail("interrupted.", 130)
    except Exception as error:
        if _is_interrupt(error) or signals.asked():
            _fail("interrupted.", 130)
        if _is_out_of_memory(error):
            _fail("out of memory; ask for a smaller model, or fewer or smaller tasks at once.", 2)
        if not hasattr(error, "format_message"):
            raise
        if not error.format_message():  # nothing was asked for: the help has been shown
            sys.exit(2)
        _fail(_renamed(error) or error.format_message(), 2)  # a wrong option or argument, in typer's words


def _noted(message: Any, category: Any, filename: str, *rest: Any, show: Any = warnings.showwarning) -> None:
    """Say what we warn of as a sentence, without the line of code; the warnings of others are shown as ever."""
    if category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[1]):
        Console(stderr=True, emoji=False).print(f"Note: {message}", markup=False, highlight=False, soft_wrap=True)
    else:
        show(message, category, filename, *rest)


def _reader_has_gone(console: Console) -> None:
    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _only_prints(arguments: Sequence[str]) -> bool:
    """Whether a command has done its work when its reader, `head` say, has seen enough."""
    return "--help" in arguments or not arguments[1:] or arguments[1] in (*PRINTING, "--version")


def _let_go_of(stream: TextIO | None) -> None:
    """Send what is left in a stream nowhere: Python would try to write it once more when it exits."""
    with suppress(OSError, ValueError, AttributeError):  # of a stream that is no file, or none at all
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: a library that is being imported may put another in its place."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _renamed(error: Exception) -> str:
    """What an option that does not exist any more is called now; empty for other mistakes."""
    option = str(getattr(error, "option_name", ""))
    new = retired.SETTINGS.get(option.removeprefix("--").replace("-", "_"))
    return f"{option} is called --{new.replace('_', '-')} now." if new else ""


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python, a GPU, or torch on a CPU, which has no exception of its own for that, is out of memory."""
    names = [kind.__name__ for kind in type(error).__mro__]
    return "OutOfMemoryError" in names or "MemoryError" in names or "DefaultCPUAllocator" in str(error)


def _in_words(error: OSError) -> str:
    """Which file, and what is wrong with it; of a draft, the file it was to become."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and not error.filename:
        return "there is no space left on the disk; make room."
    if not error.filename or not error.strerror:
        return str(error)
    path = Path(str(error.filename))
    if path.name.startswith(".") and path.name.endswith(".draft"):
        path = path.with_name(path.name[1:].removesuffix(".draft"))
    return f"{path}: {error.strerror[0].lower()}{error.strerror[1:]}; name another place."


def _fail(sentence: str, code: int) -> None:
    sentence = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)  # in a name
    console = Console(stderr=True, emoji=False, highlight=False)
    console.print(f"[bold red]error:[/bold red] {escape(sentence)}", soft_wrap=True)
    sys.exit(code)
