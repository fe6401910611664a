"""The bodies of requests, with the names of OpenAI's API and of vLLM's additions to it.

It does not know the engine. Rules: a field that would be ignored is refused; nothing is coerced; null means the
default, as in OpenAI's API; bounds that depend on the model are checked elsewhere.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from engines.bundled.request import MAX_TOP_LOGPROBS, SEED_LIMIT

MOST_CHOICES = 128  # per prompt, as in OpenAI's API


def _whole_text(text: str) -> str:
    """JSON may spell half a character (a lone surrogate), which has no bytes and no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("expected whole characters, found a lone surrogate") from error
    return text


Words = Annotated[str, AfterValidator(_whole_text)]
Token = Annotated[int, Field(ge=0)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class Body(BaseModel):
    """Strict: unknown fields, other types, NaN and infinity are errors."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream carries beside the choices."""

    include_usage: bool | None = None


class JsonSchema(Body):
    """A schema under the name that its owner gave it."""

    name: Words
    schema_: dict[str, object] | None = Field(None, alias="schema")  # any object unless given
    description: Words | None = None
    strict: bool | None = None  # the schema is kept to either way


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's way to ask for a constraint: exactly one of these."""

    json_: Words | dict[str, object] | None = Field(None, alias="json")  # a schema, as JSON or as its text
    regex: Annotated[Words, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[Words, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: Annotated[Words, Field(min_length=1)] | None = None  # Lark or GBNF
    json_object: bool | None = None


class SamplingBody(Body):
    """What both APIs share."""

    model: str
    temperature: Annotated[float, Field(ge=0)] | None = None  # 1 unless given
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # -1 and 0 are off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=0, lt=SEED_LIMIT)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # lower runs sooner
    rollback: bool | None = None  # decode on the fast path and verify
    stop: Words | list[Words] | None = None
    stop_token_ids: list[Token] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: TopLogprobs | None = None
    skip_special_tokens: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None  # these three change nothing here and are not kept
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None

    @field_validator("stop")
    @classmethod
    def _stops_have_characters(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop == "" or (isinstance(stop, list) and "" in stop):
            raise ValueError("a stop string needs at least one character")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _bias_names_tokens(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        wrong = [key for key in bias or {} if not (key.isascii() and key.isdigit() and str(int(key)) == key)]
        if wrong:
            raise ValueError(f"keys must be token ids, {wrong[0]!r} is none")
        return bias


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Words | list[Words] | list[Token] | list[list[Token]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # 16 unless given
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: None = None
    suffix: None = None


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: Words


class ChatMessage(Body):
    """One message; a list of text parts is joined."""

    role: Annotated[Words, Field(min_length=1)]
    content: Words | list[TextPart]
    name: None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # to the end of the context unless given
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # the older name
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: Literal[True] | None = None
    store: Literal[False] | None = None
