"""What paths of other APIs than OpenAI's chats and completions answer in a form of their own."""
