"""Every error Parrot raises, as one tree.

Each class has a stable ``code`` (what travels over HTTP and the wire), the HTTP status it maps to, and an
owner: whether the request, the service or the set-up is at fault. An error that crosses a process border is
an :class:`ErrorInfo`; :func:`error_from_info` rebuilds the class on the other side, so a getter in a client
sees the same type that the engine or the manager raised.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as data. ``causes`` are outermost first: the call that failed, then what made it fail."""

    code: str
    message: str
    param: str | None = None
    causes: tuple[ErrorInfo, ...] = ()


class ParrotError(Exception):
    """Base of all errors. ``param`` names the offending field; ``causes`` say what led here."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None, causes: tuple[ErrorInfo, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.causes = causes

    def __str__(self) -> str:
        """The message and, on a line each, what led to it."""
        return "\n".join([self.message, *(f"  because: {cause.message}" for cause in self.causes)])

    def to_info(self) -> ErrorInfo:
        """This error as data, ready for the wire."""
        return ErrorInfo(self.code, self.message, self.param, self.causes)


class InternalError(ParrotError):
    """A bug in Parrot: the message says where."""


# --- the request is at fault -------------------------------------------------------------------------------


class InvalidRequest(ParrotError):
    """The request cannot be carried out as written."""

    code = "invalid_request"
    http_status = 400


class TemplateError(InvalidRequest):
    """A prompt template does not parse; the message names the function, the placeholder and the line."""

    code = "template_error"


class UnknownPlaceholder(TemplateError):
    """A template names a hole that nothing binds, or a binding names no hole."""

    code = "unknown_placeholder"


class CycleError(InvalidRequest):
    """A submitted call would wait for its own output."""

    code = "cycle"


class DoubleProducer(InvalidRequest):
    """A variable that has a producer or a value already was given a second one."""

    code = "double_producer"
    http_status = 409


class PromptTooLong(InvalidRequest):
    """Prompt and output exceed the model's context or the KV cache; the message has the numbers."""

    code = "prompt_too_long"


class UnsupportedParameter(InvalidRequest):
    """A parameter that this version does not implement; refused rather than ignored."""

    code = "unsupported_parameter"


class TransformError(InvalidRequest):
    """A transform is malformed: unknown operator, bad regular expression, bad path."""

    code = "transform_error"


class NotFound(ParrotError):
    """A session, variable, call or model that does not exist here, or belongs to someone else."""

    code = "not_found"
    http_status = 404


class SessionNotFound(NotFound):
    """No such session for this client: it never existed, was deleted, or expired."""

    code = "session_not_found"


class VariableNotFound(NotFound):
    """No such variable in this session."""

    code = "variable_not_found"


class ModelNotFound(NotFound):
    """No engine serves this model."""

    code = "model_not_found"


class AuthenticationError(ParrotError):
    """The service wants an API key, and none was given or it knows no such key."""

    code = "invalid_api_key"
    http_status = 401


class PermissionDenied(ParrotError):
    """The API key is known, and is of the wrong kind for this route."""

    code = "permission_denied"
    http_status = 403


class DuplicateRequest(ParrotError):
    """A client-chosen id is still in use."""

    code = "duplicate_request"
    http_status = 409


class RequestTooLarge(ParrotError):
    """A body, a value or a number of calls above the limit; the message names the limit."""

    code = "request_too_large"
    http_status = 413


# --- a variable ended without a value ----------------------------------------------------------------------


class ExecutionError(ParrotError):
    """Base of the errors a getter sees when its variable will have no value."""

    code = "execution_error"


class EngineLost(ExecutionError):
    """The engine died or fell silent, and the call used up its retries."""

    code = "engine_lost"
    http_status = 503


class EngineError(ExecutionError):
    """The engine failed while it ran the call."""

    code = "engine_error"


class TransformFailed(ExecutionError):
    """A transform did not match the value it was given."""

    code = "transform_failed"
    http_status = 422


class ValueTooLarge(ExecutionError):
    """The values of the session, or of the tenant's sessions, would be too large with this one; the message
    names the limit."""

    code = "value_too_large"
    http_status = 422


class TypedOutputFailed(ExecutionError):
    """A typed output has no value of its type: it was cut by max_tokens, or its type refused it."""

    code = "typed_output_failed"
    http_status = 422


class UpstreamFailed(ExecutionError):
    """A call never ran because a value it needs failed; ``causes`` has that failure."""

    code = "upstream_failed"
    http_status = 424


class Cancelled(ExecutionError):
    """The variable, or everything that needed it, was cancelled."""

    code = "cancelled"
    http_status = 409


class DeadlineExceeded(ExecutionError):
    """The deadline of a get or a call passed."""

    code = "deadline_exceeded"
    http_status = 504


class SessionClosed(ExecutionError):
    """The session was deleted or expired while the variable was pending."""

    code = "session_closed"
    http_status = 410


# --- the service cannot take it now ------------------------------------------------------------------------


class Overloaded(ParrotError):
    """The queue is full; try again later."""

    code = "overloaded"
    http_status = 429


class RateLimited(Overloaded):
    """A limit of the tenant is used up; ``param`` names it, Retry-After says when to try again."""

    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        causes: tuple[ErrorInfo, ...] = (),
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message, param=param, causes=causes)
        self.retry_after_s = retry_after_s


class Unavailable(ParrotError):
    """No engine is ready, or the service is shutting down."""

    code = "unavailable"
    http_status = 503


class JournalUnavailable(Unavailable):
    """The journal cannot be written now, so nothing that must survive the manager is taken or told."""

    code = "journal_unavailable"


class ServiceStopping(Unavailable):
    """The service is shutting down, and its journal has what it was told: started again, it goes on."""

    code = "stopping"


# --- set-up and client side --------------------------------------------------------------------------------


class SetupError(ParrotError):
    """Something on this machine is missing or wrong; the message ends with the fix."""

    code = "setup_error"


class ConfigError(SetupError):
    """A configuration value is out of range; the message names field, value and range."""

    code = "config_error"


class PortInUse(SetupError):
    """The address to listen on is taken."""

    code = "port_in_use"


class ModelFileError(SetupError):
    """A model file is missing, truncated or not what it claims to be."""

    code = "model_file_error"


class ModelPackageMissing(ModelFileError):
    """The package that carries the default model is not installed."""

    code = "model_package_missing"


class JournalError(SetupError):
    """The journal's file is in use, damaged, another service's, or cannot be written."""

    code = "journal_error"


class ServiceUnreachable(ParrotError):
    """The client cannot reach the service at its URL."""

    code = "service_unreachable"
    http_status = 503


class GetTimeout(ParrotError, TimeoutError):
    """A ``get`` ran into the client's timeout; the variable is still pending and may be asked for again."""

    code = "get_timeout"
    http_status = 408


def _subclasses(cls: type[ParrotError]) -> list[type[ParrotError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _subclasses(child))]


def error_from_info(info: ErrorInfo) -> ParrotError:
    """Rebuild the typed error; an unknown code (a newer peer) becomes a plain :class:`ParrotError`."""
    by_code = {cls.code: cls for cls in _subclasses(ParrotError) if cls is not InternalError}
    cls = by_code.get(info.code, ParrotError)
    return cls(info.message, param=info.param, causes=info.causes)
