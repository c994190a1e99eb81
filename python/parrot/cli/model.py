"""``parrot model``: install, list and locate models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config import DEFAULT_MODEL

app = typer.Typer(no_args_is_help=True, help="Install, list and locate models.")
Name = Annotated[str, typer.Argument(help="smollm2, a Hugging Face directory, or a GGUF file.")]


@app.command()
def install(name: Name = DEFAULT_MODEL) -> None:
    """Fetch a model's package and convert it into the cache; does nothing when it is there."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..errors import ModelPackageMissing
    from ..models import install_model, install_package

    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"installing {name}", total=1.0)

        def report(step: str, done: float) -> None:
            progress.update(task, description=step, completed=done)

        try:
            directory = install_model(name, report)
        except ModelPackageMissing:
            report(f"fetching the package of {name}", 0.0)
            install_package(name)
            directory = install_model(name, report)
        progress.update(task, description=f"{name} is ready", completed=1.0)
    typer.echo(directory)


@app.command("list")
def list_models() -> None:
    """Name the models that a package carries, and what lies converted in the cache."""
    from ..models import cached_models, is_current, packaged_models

    for name, installed in packaged_models().items():
        typer.echo(f"{name}: {'installed' if installed else f'not installed; parrot model install {name}'}")
    for directory in cached_models():
        size_mib = sum(file.stat().st_size for file in directory.iterdir()) // 2**20
        made = "converted" if is_current(directory) else "converted by another version, not used by this one"
        typer.echo(f"{made}, {size_mib} MiB: {directory}")


@app.command()
def path(name: Name = DEFAULT_MODEL) -> None:
    """Print the directory that an engine would load."""
    from ..models import resolve_model

    typer.echo(resolve_model(name))


@app.command()
def dummy(
    shape: Annotated[str, typer.Argument(help="llama-7b, llama-13b, llama3-8b, qwen3-0.6b or tiny.")],
    directory: Annotated[Path, typer.Argument(help="A new directory.")],
) -> None:
    """Write the shape of a known model without its weights, and a tokenizer in which every id is one word.

    Served with `parrot serve --model DIRECTORY --dummy-weights`, it takes the time that the model would."""
    from ..dummy_model import write_dummy_model

    typer.echo(write_dummy_model(directory, shape))
