"""Why calls cannot run now, if they cannot: what ``/ready`` and ``parrot_ready`` say."""

from __future__ import annotations

from .engines import EngineRegistry
from .service import Service
from .supervisor import Supervisor


def unready_reason(
    service: Service, registry: EngineRegistry, supervisor: Supervisor | None = None
) -> str | None:
    """One line for whoever operates the service; None when calls can run."""
    if service.executor.refusal is not None:
        return service.executor.refusal
    if not service.recovered.is_set():
        return "the sessions of the journal are being rebuilt"
    if service.journal is not None and service.journal.problem is not None:
        return service.journal.problem
    if registry.background.problem is not None:
        return registry.background.problem
    if any(engine.state != "draining" for engine in registry.alive):
        return service.executor.watchdog.problem
    if registry.alive:
        return "every engine is draining: " + ", ".join(engine.name for engine in registry.alive)
    if registry.stalled:
        return "; ".join(registry.stalled[:8])
    if supervisor is not None and supervisor.problem is not None:
        return supervisor.problem
    if registry.views():
        gone = (f"{view.name} {'left' if view.state == 'left' else 'is lost'}" for view in registry.views())
        return f"no engine is there: {', '.join(gone)}"
    if supervisor is not None and supervisor.num_children:
        return "the engine is starting"
    return f"no engine has joined at {registry.address} yet"
