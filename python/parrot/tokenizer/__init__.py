"""Tokens of a model: text to ids and back, segmented prompts, chat templates. Imports no torch."""

from .chat import render_chat
from .segments import EncodedPrompt, Piece, PromptEncoder
from .token_bytes import TokenBytes
from .tokenizer import Tokenizer

__all__ = ["EncodedPrompt", "Piece", "PromptEncoder", "TokenBytes", "Tokenizer", "render_chat"]
