"""In which form a request's prompt is sent: ids, text or messages. It sends nothing.

Rules: ids are sent where an interface takes them; text stands in only where it encodes to the very ids; a chat
template is applied by one side alone.
"""

from __future__ import annotations

from engines.http.dialect import Dialect, Prompt, refuse
from engines.http.options import TEXT_MODEL
from harness.engine import Tokenizer
from harness.request import Request


def build_prompt(request: Request, dialect: Dialect, form: str, model: str, tokenizer: Tokenizer) -> Prompt:
    """The prompt as it will be sent; `form` is the setting `prompts`. Raises Unsupported, naming the request."""
    chat = dialect.path.endswith("/chat/completions")
    if chat:
        if request.messages is None:
            raise refuse(request, "prompt", "chat takes messages, and this request has none; set api=completions")
        return Prompt(messages=request.messages)
    if model == TEXT_MODEL:
        if request.text is None:
            raise refuse(request, "text", "without a tokenizer only text can be sent; set api=chat for messages")
        return Prompt(text=request.text)
    if form != "text" and dialect.takes_ids:
        return Prompt(ids=request.prompt_token_ids)
    if form == "ids":
        raise refuse(request, "prompt", "this interface takes no token ids; set prompts=text")
    text = tokenizer.decode(request.prompt_token_ids)
    if tokenizer.encode(text) != request.prompt_token_ids:
        raise refuse(request, "prompt", "its token ids are not what their text encodes to, and only text can be sent")
    return Prompt(text=text)
