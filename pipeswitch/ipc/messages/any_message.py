"""The union of all messages: what a channel decodes."""

from __future__ import annotations

from .base import ByteRange, Exit, Ping, Pong, SlabTensor, StepCommitted
from .builder import BuildDone, BuildFailed, BuildProgress, BuildSettings
from .daemon import (
    CancelTransmit,
    CloseCommits,
    CommitCopy,
    CommitPersisted,
    DaemonFault,
    DaemonReady,
    DaemonSettings,
    GroupCopy,
    ModelStored,
    OpenCommits,
    PersistCommit,
    Scrub,
    Scrubbed,
    StoreFailed,
    StoreModel,
    TransmitEnded,
    TransmitModel,
)
from .fork_server import ChildExited, Fork, Forked, ForkServerReady
from .gateway import GatewaySettings, KeyedSettings
from .stage import CheckStage, RunStage, StageDone, StageFailed, StageReady, StageSettings
from .worker import (
    Back,
    BindTenant,
    Cleaned,
    CommitStep,
    EvictTask,
    ForgetModel,
    GrantTurn,
    HostGranted,
    HostRequest,
    InferenceDone,
    InferenceFailed,
    JobEnded,
    JobReport,
    LeaseGranted,
    LeaseRefused,
    LeaseRequest,
    ModelPrepared,
    Parked,
    PrepareModel,
    PublishAnswered,
    PublishCopied,
    PublishStep,
    RunInference,
    RunJob,
    SteppedAside,
    StopTask,
    WorkerReady,
    WorkerSettings,
)

AnyMessage = (
    Fork | ForkServerReady | Forked | ChildExited | DaemonSettings | DaemonReady | StoreModel
    | ModelStored | StoreFailed | GroupCopy | TransmitModel | CancelTransmit | TransmitEnded | Scrub
    | Scrubbed | OpenCommits | CloseCommits | ByteRange | CommitCopy | PersistCommit
    | CommitPersisted | DaemonFault | WorkerSettings | WorkerReady | BindTenant | PrepareModel
    | ModelPrepared | ForgetModel | SlabTensor | RunInference | InferenceDone | InferenceFailed
    | SteppedAside | Cleaned | RunJob | LeaseRequest | LeaseGranted | LeaseRefused | StopTask
    | HostRequest | HostGranted | Parked | Back | GrantTurn
    | EvictTask | CommitStep | StepCommitted | PublishStep | PublishAnswered
    | PublishCopied | JobReport | JobEnded | Ping | Pong | Exit
    | BuildSettings | BuildProgress | BuildDone | BuildFailed | StageSettings | CheckStage
    | StageReady | RunStage | StageDone | StageFailed | GatewaySettings | KeyedSettings
)  # fmt: skip
