"""Every message of the two links. A message travels as [tag, *fields]; per-row data are bytes columns, little-endian.

Reserved: slot 0, page 0 and sequence id 0 mean nothing. A sequence is one choice of one request; its id is chosen by the
gateway, is unique within one gateway identity and never reused there.
"""

from typing import Annotated, NamedTuple, TypeAlias

PROTOCOL = 7  # raised whenever a message changes shape or meaning; peers of another number are refused with both numbers

I32 = Annotated[bytes, 4]  # column of int32
I64 = Annotated[bytes, 8]  # column of int64
F32 = Annotated[bytes, 4]  # column of float32
U8 = Annotated[bytes, 1]  # column of uint8
HASHES = Annotated[bytes, 16]  # column of 128-bit page hashes
SAMPLING = Annotated[bytes, 56]  # one shared.sampling.Sampling record
OPENS = Annotated[bytes, 64]  # column of (slot i32, computed i32, Sampling record)
EDITS = Annotated[bytes, 12]  # column of (token i32, value f32, until i32), see shared.sampling.Edit
REGISTRATIONS = Annotated[bytes, 20]  # column of (page i32, hash 16 bytes)


class Finish:
    """Why a sequence ended (the reason column of Tokens)."""

    STOP = 1  # one of its stop ids was sampled; that id is its last token
    LENGTH = 2  # max_new tokens were produced, or the model's or pool's limit was reached
    ABORT = 3  # the gateway asked for it, or went away
    ERROR = 4  # it could not be computed (two strikes, or a row without any allowed token)
    DEADLINE = 5  # its deadline passed


# --- either side of either link -------------------------------------------------------------------------------------


class Reset(NamedTuple):
    """I do not know you (or we cannot work together): close, take a new nonce and say Hello again, unless fatal."""

    reason: str
    fatal: bool  # True: saying Hello again unchanged cannot help (protocol or model mismatch); show reason to a person


class Drain(NamedTuple):
    """The sender (or, from the scheduler, the receiver) is about to leave: nothing new is placed there."""

    reason: str


# --- gateway -> scheduler -------------------------------------------------------------------------------------------


class GatewayHello(NamedTuple):
    protocol: int
    name: str
    model: str  # fingerprint of the gateway's model folder (shared.model_folder.fingerprint)


class Submit(NamedTuple):
    """One sequence. tokens may be longer than num_prompt: a resumed sequence looks like any other."""

    id: int
    tokens: I32  # prompt ids, then the output ids delivered so far
    num_prompt: int
    max_new: int  # output tokens in all, those already in tokens included; 0: score the prompt only
    min_new: int  # stop ids do not end the sequence before this many output tokens
    stop_ids: I32
    sampling: SAMPLING
    edits: EDITS
    root_hash: HASHES  # parent of the first page's hash: the cache salt
    page_hashes: HASHES  # of every full page of tokens
    priority: int  # lower runs earlier; 0 is the default
    tenant: str
    age_s: float  # time since the request arrived at the gateway; keeps its place in the queue after a resubmit
    deadline_s: float  # seconds from now; 0: none
    cached: int = -1  # prompt tokens that were in the cache when it started first; -1: it never has
    stream: str = ""  # under which any gateway may take it over (Resume); empty: none will
    turn: int = 0  # how often the stream had been taken over when this gateway got it: a later one has it now
    choice: int = 0  # its number in that stream
    ticket: bytes = b""  # what a gateway needs besides the tokens to go on with it; means nothing to the scheduler
    weight: int = 1  # of the tenant: its share of what is computed while several tenants wait
    request: str = ""  # the id under which logs know the request; empty: none
    trace: str = ""  # W3C traceparent of the span that waits for it; empty: it is not traced
    again: bool = False  # this gateway told a scheduler of it before, who has not refused it: who was let in stays in


STOPPED = "stop string"  # Abort.reason of sequences whose answer is whole; booked as STOP, not as ABORT


class Abort(NamedTuple):
    ids: I64
    reason: str  # STOPPED, or why nobody wants the rest


class Resume(NamedTuple):
    """A client came for a stream, whoever had it so far. Answered by Kept for every choice, or one whose total is 0."""

    ask: int  # comes back in the answers
    stream: str
    tenant: str


class Kept(NamedTuple):
    """One choice of a stream that a client may come for. Scheduler -> gateway: the answer to a Resume, and the gateway's from
    now on; or (ask 0) to be kept for the scheduler that comes next, until told to forget the stream (total 0). Gateway ->
    scheduler, after a welcome: it was left here, has ended here, or was kept for whoever has it."""

    ask: int  # 0: no answer
    total: int  # choices of the stream that are known; 0: no such stream, and the other fields mean nothing
    stream: str
    turn: int  # see Submit
    choice: int
    tenant: str
    ticket: bytes
    tokens: I32
    num_prompt: int
    cached: int
    reason: int  # Finish, or 0: it has not ended
    age_s: float  # time since the request arrived


class DrainWorker(NamedTuple):
    """An operator wants a worker to leave. Answered by DrainAnswer."""

    ask: int  # comes back in the answer
    worker: str  # its replica's name
    reason: str


# --- scheduler -> gateway -------------------------------------------------------------------------------------------


class GatewayWelcome(NamedTuple):
    protocol: int
    epoch: int  # of this scheduler process; grows with every restart
    page_tokens: int  # tokens in one page
    hash_key: bytes  # key of the page hashes


class Status(NamedTuple):
    """Sent after Welcome, whenever it changes, and once a second."""

    state: str  # "ready", "loading" (no worker yet), "draining"
    reason: str  # for a person, empty when ready
    max_model_len: int  # prompt + output tokens of one sequence; 0 while no worker is known
    pool_tokens: int  # tokens that fit into the largest replica's pages: no sequence may need more
    num_queued: int
    num_running: int
    wait_s: float  # predicted wait of a request that arrives now


class Tokens(NamedTuple):
    """What one step produced for sequences of one gateway; of a large step there are several (started in the first, finished
    in the last). A sequence may stand in several rows (in order)."""

    ids: I64
    indexes: I32  # output index of the token, 0-based
    tokens: I32
    logprobs: F32  # of the token, NaN where not asked; empty when no row asked
    top_width: int  # alternatives per row, 0 when no row asked
    top_ids: I32  # [rows, top_width], id 0 with -inf where not asked or fewer
    top_logprobs: F32  # [rows, top_width]
    started_ids: I64  # sequences that entered a plan for the first time ...
    started_cached: I32  # ... and how many of their prompt tokens came from the prefix cache
    finished_ids: I64
    finished_reasons: U8


class PromptScores(NamedTuple):
    """Log-probabilities of prompt tokens start .. start + rows - 1 (token 0 has none). Comes before Tokens of the same step."""

    id: int
    start: int
    logprobs: F32
    top_width: int
    top_ids: I32  # [rows, top_width]
    top_logprobs: F32  # [rows, top_width]


class Reject(NamedTuple):
    """A Submit that will not run. Every Submit gets Tokens with a finish, or Reject."""

    id: int
    status: int  # HTTP status that fits: 400, 408, 429, 503, 504, 500
    code: str  # machine readable, e.g. "context_length_exceeded"
    text: str  # for a person, with both numbers
    param: str  # request field at fault, or ""
    retry_after_s: float  # 0: do not retry unchanged


class DrainAnswer(NamedTuple):
    """The worker was told to leave and nothing runs there any more, or there is no such worker."""

    ask: int
    num_moved: int  # sequences that went back to the queue
    error: str  # for a person, empty when it worked


# --- worker -> scheduler --------------------------------------------------------------------------------------------


class WorkerHello(NamedTuple):
    protocol: int
    replica: str  # name of the copy of the model this worker belongs to
    rank: int  # 0 .. tp - 1
    tp: int
    group: int  # the ranks that can compute together have the same number; 0: tp is 1
    model: str  # fingerprint: model folder, dtype, quantization
    page_tokens: int
    num_pages: int  # page 0 included: num_pages - 1 are usable
    num_slots: int  # slot 0 included: num_slots - 1 sequences can run
    max_batched_tokens: int  # tokens of all rows of one plan
    max_model_len: int
    inventory: REGISTRATIONS  # pages whose content is known, for the prefix index
    process: int = 0  # drawn at its start: who says hello again with the same number has not died; 0: unknown


class StepDone(NamedTuple):
    """Results of one plan. Sampled rows are its num_last + num_decode last rows, in order."""

    step: int
    tokens: I32  # of sampled rows; -1: the row had no allowed token
    logprobs: F32  # of sampled rows, or empty when no slot of the plan asked
    top_width: int
    top_ids: I32  # [sampled rows, top_width]
    top_logprobs: F32
    score_logprobs: F32  # for StepPlan.score_positions
    score_top_width: int
    score_top_ids: I32  # [score rows, score_top_width]
    score_top_logprobs: F32
    step_us: int  # device time of the step


class WorkerAlive(NamedTuple):
    step: int  # last step that finished
    memory_used_bytes: int  # of the device
    memory_total_bytes: int
    utilization: float  # busy share of the last second, 0 .. 1


class Fault(NamedTuple):
    """Plan step failed; nothing it wrote may be shared. The worker says Hello again afterwards, or exits."""

    step: int
    text: str


# --- scheduler -> worker --------------------------------------------------------------------------------------------


class WorkerWelcome(NamedTuple):
    epoch: int
    credits: int  # plans that may be in flight
    turn: int  # with the epoch a number of its own: the same for all ranks of the replica that begins here


class StepPlan(NamedTuple):
    """One step of one replica. Applied in plan order: opens, edits, history, page_writes, page_copies, then the rows.

    Rows are ordered: num_chunk rows of unfinished prefill (not sampled), num_last rows that finish their prefill (sampled),
    num_decode rows (sampled) whose one input token is the slot's last token. A slot's length grows by the row's length.
    """

    step: int
    num_chunk: int
    num_last: int
    num_decode: int
    row_slots: I32  # [num_chunk + num_last + num_decode]
    row_lens: I32  # [num_chunk + num_last]; a decode row has length 1
    tokens: I32  # ids of the prefill rows, concatenated in row order
    page_writes: I32  # [n, 3] of (slot, index in the slot's page table, page)
    opens: OPENS  # reopen a slot: set its length to computed and its sampling parameters; its edits become empty
    edit_counts: I32  # [m, 2] of (slot, number of edits)
    edits: EDITS  # concatenated in the order of edit_counts; they replace the slot's edits
    history_counts: I32  # [k, 3] of (slot, first position, number of ids): only for slots that need their token history
    history: I32  # those ids, concatenated
    registrations: REGISTRATIONS  # pages complete after this plan: remembered for the inventory only; hash 0: no more known
    page_copies: I32  # [n, 2] of (from page, to page)
    score_positions: I32  # indexes into tokens whose next-token distribution is wanted ...
    score_targets: I32  # ... and the id whose log-probability is wanted there
    score_width: int  # alternatives wanted per score position
    # Decode rows that share a prefix are neighbours, groups in order from the first decode row; later rows share nothing.
    group_counts: I32  # [g, 2] of (number of decode rows, leading pages they share)
    opened: str = ""  # ids of the requests that it opens slots for, separated by spaces: for logs only


GATEWAY_TO_SCHEDULER = (GatewayHello, Submit, Abort, Resume, Kept, DrainWorker, Drain, Reset)
SCHEDULER_TO_GATEWAY = (GatewayWelcome, Status, Tokens, PromptScores, Reject, Kept, DrainAnswer, Drain, Reset)
WORKER_TO_SCHEDULER = (WorkerHello, StepDone, WorkerAlive, Fault, Drain, Reset)
SCHEDULER_TO_WORKER = (WorkerWelcome, StepPlan, Drain, Reset)

FromGateway: TypeAlias = GatewayHello | Submit | Abort | Resume | Kept | DrainWorker | Drain | Reset
ToGateway: TypeAlias = GatewayWelcome | Status | Tokens | PromptScores | Reject | Kept | DrainAnswer | Drain | Reset
FromWorker: TypeAlias = WorkerHello | StepDone | WorkerAlive | Fault | Drain | Reset
ToWorker: TypeAlias = WorkerWelcome | StepPlan | Drain | Reset
