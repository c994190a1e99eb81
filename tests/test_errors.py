"""The error tree: what a reader of a traceback sees, and what travels."""

from __future__ import annotations

from parrot.errors import ErrorInfo, UpstreamFailed, error_from_info


def test_the_text_of_an_error_shows_its_causes_and_its_message_does_not() -> None:
    causes = (ErrorInfo("upstream_failed", "b failed"), ErrorInfo("transform_failed", "no item 9"))
    error = error_from_info(UpstreamFailed("c never ran", causes=causes).to_info())
    assert str(error) == "c never ran\n  because: b failed\n  because: no item 9"
    assert (error.message, error.to_info().message) == ("c never ran", "c never ran")
    assert str(UpstreamFailed("alone")) == "alone"
