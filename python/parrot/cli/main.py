"""The ``parrot`` command. Each subcommand is one file; heavy modules are imported only when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..errors import ParrotError
from . import demo, doctor, key, model, serve
from .topics import TopicCommand

app = typer.Typer(
    name="parrot",
    help="Serves LLM applications: whole graphs of prompt templates joined by Semantic Variables.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    add_completion=False,
    rich_markup_mode=None,  # its tables cut option names off where a terminal is narrow
    pretty_exceptions_enable=False,
)
app.command(cls=TopicCommand)(serve.serve)
app.command(cls=TopicCommand)(serve.manager)
app.command(cls=TopicCommand)(serve.engine)
app.command()(demo.demo)
app.command()(doctor.doctor)
app.add_typer(key.app, name="key")
app.add_typer(model.app, name="model")


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"parrot {__version__}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before a command."""


def main() -> None:
    """Entry point. A :class:`ParrotError` becomes one line that ends with the fix, and exit code 2."""
    try:
        app()
    except ParrotError as error:
        fail(error.message)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def fail(message: str) -> None:
    """Print ``message`` as one red line on standard error and exit with code 2."""
    from rich.console import Console

    line = " ".join(message.split())
    Console(stderr=True, soft_wrap=True).print(f"error: {line}", style="red", markup=False, highlight=False)
    sys.exit(2)


if __name__ == "__main__":
    main()
