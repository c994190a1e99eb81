"""``parrot key``: API keys of tenants and of the operator, in the file that ``--api-keys`` names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import check_range
from ..errors import ConfigError, NotFound

if TYPE_CHECKING:
    from ..manager.key_file import TenantLimits

app = typer.Typer(no_args_is_help=True, help="API keys of tenants, CURVE keys of engines.")
File = Annotated[Path, typer.Option("--file", help="The file of keys, as --api-keys names it to a service.")]
Tenant = Annotated[str, typer.Argument(help="Letters, digits, '.', '_' and '-'.")]
Note = Annotated[str, typer.Option(help="What the list says beside the key.")]
Weight = Annotated[float | None, typer.Option(help="Share of the engines while others wait; 1 unless set.")]
RequestsPerMinute = Annotated[int | None, typer.Option(help="HTTP requests; no limit unless set.")]
TokensPerMinute = Annotated[int | None, typer.Option(help="Of prompts and outputs; no limit unless set.")]
MaxConcurrentCalls = Annotated[
    int | None, typer.Option(help="Calls submitted and not finished; no limit unless set.")
]


@app.command()
def new(
    tenant: Tenant,
    file: File,
    weight: Weight = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    max_concurrent_calls: MaxConcurrentCalls = None,
    note: Note = "",
) -> None:
    """Add a key of a tenant, made if it is not there; limits that are given replace those it has.

    The key is printed on standard output, this once; the file has only its hash."""
    from ..manager.key_store import add_tenant_key

    _check_tenant(tenant)
    limits = _given(weight, requests_per_minute, tokens_per_minute, max_concurrent_calls)
    _hand_out(add_tenant_key(file, tenant, limits, note), f"a key of tenant {tenant}")


@app.command()
def operator(file: File, note: Note = "") -> None:
    """Add a key of the operator: it sees metrics, engines and everybody's calls, and can run nothing."""
    from ..manager.key_store import add_operator_key

    _hand_out(add_operator_key(file, note), "an operator's key")


@app.command("limits")
def set_limits(
    tenant: Tenant,
    file: File,
    weight: Weight = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    max_concurrent_calls: MaxConcurrentCalls = None,
) -> None:
    """Change limits of a tenant, and show those it has then; what is not given stays. To lift one, take it
    out of the file."""
    from ..manager.key_file import read_key_file
    from ..manager.key_store import set_limits

    limits = _given(weight, requests_per_minute, tokens_per_minute, max_concurrent_calls)
    if limits:
        set_limits(file, tenant, limits)
    tenants = read_key_file(file).tenants
    if tenant not in tenants:
        raise NotFound(f"{file} has no tenant {tenant!r}; `parrot key list` shows them", param="tenant")
    typer.echo(_limits_line(tenant, tenants[tenant]))


@app.command("list")
def list_keys(file: File) -> None:
    """Show the tenants with their limits, and the keys by id."""
    from ..manager.key_file import read_key_file

    content = read_key_file(file)
    for tenant, limits in content.tenants.items():
        typer.echo(_limits_line(tenant, limits))
    for entry in content.keys:
        words = [f"key {entry.key_id}: {entry.owner}", entry.created and f"made {entry.created}", entry.note]
        typer.echo(", ".join(word for word in words if word))


@app.command()
def revoke(key_id: Annotated[str, typer.Argument(help="As `parrot key list` shows it.")], file: File) -> None:
    """Take out a key. A service notices within a second; what it runs for the key's owner goes on."""
    from ..manager.key_store import revoke_key

    entry = revoke_key(file, key_id)
    typer.echo(f"key {entry.key_id} of {entry.owner} is revoked")


@app.command()
def curve(
    directory: Annotated[Path, typer.Argument(help="Where the keys are, as --curve-keys names it.")],
    engine: Annotated[str, typer.Option(help="A name for the key; one may serve many.")] = "engine",
) -> None:
    """Make keys with which engines of other machines join: the manager's, unless there are, and an engine's.

    The engine's machine needs manager.key, and the engine's key_secret as engine.key_secret."""
    from ..curve import make_curve_keys

    for path in make_curve_keys(directory, engine):
        typer.echo(path)


def _given(
    weight: float | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    max_concurrent_calls: int | None,
) -> dict[str, float]:
    options = {
        "weight": weight,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent_calls": max_concurrent_calls,
    }
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        low, high = (0.001, 1000.0) if name == "weight" else (1, 2**31 - 1)
        check_range("--" + name.replace("_", "-"), value, low, high)
    return given


def _check_tenant(name: str) -> None:
    from ..manager.key_file import TENANT_PATTERN

    if re.fullmatch(TENANT_PATTERN, name) is None:
        raise ConfigError(
            f"tenant {name!r}: only letters, digits, '.', '_' and '-', 1 to 64 of them, the first a letter "
            "or a digit",
            param="tenant",
        )


def _limits_line(tenant: str, limits: TenantLimits) -> str:
    shown = {"weight": limits.weight, **limits.model_dump(exclude_none=True)}
    return f"tenant {tenant}: " + ", ".join(f"{name} {value:.10g}" for name, value in shown.items())


def _hand_out(key: str, whose: str) -> None:
    typer.echo(f"{whose}; it is shown this once:", err=True)
    typer.echo(key)
