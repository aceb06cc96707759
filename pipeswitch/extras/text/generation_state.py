"""One generation: its ids so far, its sampling parameters, and its cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from ...base.errors import InvalidInput, PipeSwitchError, ServerUnavailable
from ...frontend.intake.request_pool import PoolAllocation
from ...frontend.intake.validation import Body, tenant_of
from ...frontend.kinds import KindContext, KindRequest
from ...frontend.transport.clients import Session
from ...ipc.messages.run import SamplingParams
from ...programs.graphs.bundle import read_bundle
from ...programs.interface.layout import BUNDLE_FILE
from ...scheduler.memory.blocks import Tokens, tokens_of
from ...scheduler.state.events import ModelAvailable
from ...wire.frames import RequestHeader
from .caches import Cache, longest
from .decoding.generation_settings import MAX_EOS, MOST_STEPS
from .decoding.grammar import check_schema, ends_of
from .decoding.model_config import check_stop_ids, seen_of
from .decoding.sampling import Options, Sampling, sampling_of

FACTS: Final = ("vocabulary", "eos_ids", "bos_id", "sampling", "has_tokenizer", "pooling")
MAX_TOKENS: Final = 1 << 40  # longer than any context
MAX_STOP_IDS: Final = 2 * MAX_EOS
MOST_CHANCES: Final = 96  # log probabilities that one run may report


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``generate``, without the fields about the caller."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 128
    so_far: tuple[int, ...] = ()  # tokens from an earlier try of this request
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_STOP_IDS)] = ()
    ignore_eos: bool = False  # do not end at the model's own end tokens
    options: Options | None = None


class Generation(msgspec.Struct, kw_only=True, eq=False):
    """The state of one request of verb ``generate``."""

    caller: str
    announced: ModelAvailable  # the version that it began with
    ids: Tokens[int]  # the prompt and the tokens so far
    prompt_count: int
    scored: Tokens[int]  # the prompt, if the reply reports its tokens' log probabilities
    most: int  # maximum number of new tokens
    piece: int  # maximum number of ids that one run reads
    stop: tuple[int, ...]
    sampling: Sampling
    began_at_ms: float = 0.0
    first_token_ms: float = 0.0
    cache: Cache | None = None  # None: it has no cache now
    number: int = 0  # order of arrival; the youngest gives up its cache first
    compute_ms: float = 0.0  # time of the runs so far
    count: int = 0  # ids that the current run reads
    ahead: int = MOST_STEPS  # limit of a run's steps: twice the tokens of the last decode run
    sampling_params: SamplingParams = SamplingParams()  # parameters of the current run
    reused: int = 0  # ids of the prompt whose rows were cached
    allocation: PoolAllocation | None = None  # pool memory for a run's inputs

    @property
    def token_count(self) -> int:
        """Number of new tokens so far; negative while tokens of the prompt are scored."""
        return len(self.ids) - self.prompt_count

    @property
    def rows(self) -> int:
        """Number of rows to allocate memory for at once.
        A generation that lost its cache requests more, so that it restarts only a few times."""
        ahead = max(len(self.ids) // 2, MOST_STEPS) if self.token_count else 0
        return min(len(self.ids) + ahead, self.prompt_count + self.most)

    def next(self, used: int, most: int, *, is_short: bool = False) -> SamplingParams:
        """Begin the next run, for a cache with ``used`` rows, of at most ``most`` ids and, if it
        ``is_short``, of one step; return its sampling parameters."""
        self.count = min(len(self.ids) - used, self.piece, most)
        is_piece, remaining = used + self.count < len(self.ids), self.most - self.token_count
        how, options = self.sampling, self.sampling.options
        token_counts: tuple[tuple[int, int], ...] = ()
        if options is not None and options.needs_seen and not is_piece:
            token_counts = tuple(seen_of(self.ids, self.prompt_count).items())
        forced = () if is_piece else tuple(self.scored[len(self.ids) :][:MOST_STEPS])
        most_steps, answer = min(self.ahead, len(forced) or remaining), tuple[int, ...]()
        if options is not None and options.logprobs:  # a run's results must fit in one packet
            most_steps = min(most_steps, max(1, MOST_CHANCES // options.logprobs))
        if options is not None and options.json_schema and not is_piece:
            answer = tuple(self.ids[self.prompt_count :])
        self.sampling_params = SamplingParams(
            steps=1 if is_piece or is_short or self.count > 1 else most_steps,
            temperature=how.temperature,
            top_p=how.top_p,
            seed=how.seed,
            options=None if options is None else msgspec.to_builtins(options),
            seen=token_counts,
            stop=() if forced else self.stop,
            left=remaining,
            is_piece=is_piece,
            forced=forced,
            answer=answer,
        )
        return self.sampling_params

    def has_chances(self, body: dict[str, Any]) -> bool:
        """Return True if a run reported log probabilities for exactly the requested tokens."""
        options, chances = self.sampling.options, body.get("logprobs", ())
        if options is None or options.logprobs is None:
            body.pop("logprobs", None)  # computed for other requests of the batch
            return not chances
        vocabulary = self.announced.manifest.extra["generation"]["vocabulary"]
        return len(chances) == len(body["tokens"]) and all(
            len(top) <= options.logprobs and all(0 <= token < vocabulary for token, _ in top)
            for _, top in chances
        )

    def new_rows(self, tokens: int) -> int:
        """Return the number of rows that a run adds if it chooses ``tokens`` tokens."""
        return self.count + max(tokens - 1, 0)


def facts_of(
    announced: ModelAvailable, model: str, share_bytes: int
) -> tuple[Mapping[str, Any], int, int]:
    """Return a bundle's facts about its tokens, and two limits for the number of tokens.
    The limits are for a prompt with its answer, and for one run.

    Raises:
        InvalidInput: the model generates no text, or the pool has no room for an answer.
    """
    facts = announced.manifest.extra.get("generation")
    if not facts:
        raise InvalidInput(
            f'"{model}" does not generate text',
            hint="GET /v1/models lists language models; pipeswitch run hf:NAME registers one",
        )
    context, piece = longest(announced.manifest, share_bytes)
    if context < 2:
        raise InvalidInput(
            f'the request pool has no memory for an answer of "{model}"', hint="raise [server] pool"
        )
    return facts, context, piece


def generation_of(request: KindRequest, share_bytes: int) -> Generation:
    """Return the generation that a request describes.

    Args:
        share_bytes: bytes of the request pool that one caller may hold.

    Raises:
        InvalidInput: the model generates no text, the prompt does not fit it, or a setting is out
            of its range.
    """
    header, announced, origin = request.header, request.announced, request.arrival.origin
    body: GenerateBody = request.body.rest(GenerateBody)
    facts, context, piece = facts_of(announced, header.model, share_bytes)
    tensors, vocabulary = header.inputs, facts["vocabulary"]
    is_ids = len(tensors) == 1 and (tensors[0].dtype, len(tensors[0].shape)) == ("int64", 1)
    if not is_ids or len(request.tensors[0]) != 8 * tensors[0].shape[0]:
        raise InvalidInput("generate takes one input, the prompt's ids: int64 with one dimension")
    if not 0 < (count := tensors[0].shape[0]) < context:
        raise InvalidInput(f"a prompt of {count} tokens: the model takes 1 to {context - 1}")
    sampling = sampling_of(body)
    sampling.check()
    scores = sampling.options is not None and sampling.options.scores_prompt
    came = len(body.so_far) - (count - 1 if scores else 0)
    if came >= (most := min(body.max_tokens, context - count)):
        raise InvalidInput(f"so_far has {came} tokens; the maximum is {most}")
    if sampling.options is not None:
        sampling.options.check(vocabulary)
    # The sender can still change shared memory, so the ids are copied first.
    prompt = [*memoryview(bytes(request.tensors[0])).cast("q")]
    ids = [*prompt, *body.so_far]
    if odd := [one for one in (min(ids), max(ids)) if not 0 <= one < vocabulary]:
        raise InvalidInput(f"{odd[0]} is not a token from 0 to {vocabulary - 1}")
    check_stop_ids(body.stop_ids, vocabulary)
    ends = (*(() if body.ignore_eos else facts["eos_ids"]), *body.stop_ids)
    if sampling.options is not None and (schema := sampling.options.json_schema):
        check_schema(schema, ends_of(facts["eos_ids"], ends))
    return Generation(
        caller=origin.caller,
        began_at_ms=origin.arrived_at_ms,
        announced=announced,
        ids=tokens_of([prompt[0], *body.so_far] if scores else ids),
        scored=tokens_of(prompt if scores else []),
        prompt_count=count,
        most=most,
        piece=piece,
        stop=ends,
        sampling=sampling,
    )


def answer_facts(
    context: KindContext, client: Session, header: RequestHeader, _: Sequence[Any]
) -> None:
    """Handle the verb ``generation``: reply with a language model's facts for its clients."""
    body = Body("generation", header.body)
    version, wants_tokenizer = body.count("version", 0), body.flag("tokenizer")
    embeds, caller = body.flag("embedding"), tenant_of(body, client.principal.tenant)
    body.done()
    announced = context.models.find(header.model, version, caller)
    if embeds:
        facts = announced.manifest.extra.get("embedding", {})
        most = facts.get("context", 0)
        if not facts:
            raise InvalidInput(
                f'"{header.model}" does not embed texts',
                hint="register an encoder, or hf:NAME#…Model for a decoder, whose source has a "
                "tokenizer, without --generate",
            )
    else:
        facts, most = facts_of(announced, header.model, context.pool.share_bytes)[:2]
    digest = announced.manifest.digest
    result: dict[str, Any] = {key: facts[key] for key in FACTS if key in facts}
    result |= {"context": most, "version": announced.version, "digest": digest}
    file = context.models_dir / digest / BUNDLE_FILE

    def read() -> None:
        """Read the tokenizer on the copier's thread, because it may have 30 MB."""
        text: Any = read_bundle(file).settings if wants_tokenizer else None
        if text is not None:
            result.update(
                tokenizer=text.tokenizer, chat_template=text.chat_template, special=text.special
            )
        reply(None)

    def reply(error: PipeSwitchError | None) -> None:
        if error is not None:
            error = ServerUnavailable(f'the tokenizer of "{header.model}" cannot be read')
        context.call_soon(lambda: context.reply(client, header.id, body=result, error=error))

    context.copier.put(read, reply)
