"""Paths and errors of other APIs than OpenAI's chats and completions."""
