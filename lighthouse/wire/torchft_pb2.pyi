import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class QuorumMember(_message.Message):
    __slots__ = ("replica_id", "address", "store_address", "step", "world_size", "shrink_only", "data", "commit_failures", "reconfigure_handles", "commit_quorum_id", "fingerprint", "broken_quorum_id", "may_stand", "own_failure", "own_failures", "may_catch_up", "reached_step", "reached_quorum_id", "has_fetched", "takes_secret", "timeout_ms", "rank_addresses")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHRINK_ONLY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BROKEN_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    MAY_STAND_FIELD_NUMBER: _ClassVar[int]
    OWN_FAILURE_FIELD_NUMBER: _ClassVar[int]
    OWN_FAILURES_FIELD_NUMBER: _ClassVar[int]
    MAY_CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    REACHED_STEP_FIELD_NUMBER: _ClassVar[int]
    REACHED_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_FETCHED_FIELD_NUMBER: _ClassVar[int]
    TAKES_SECRET_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    RANK_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: str
    commit_failures: int
    reconfigure_handles: _containers.RepeatedScalarFieldContainer[str]
    commit_quorum_id: int
    fingerprint: bytes
    broken_quorum_id: int
    may_stand: bool
    own_failure: str
    own_failures: int
    may_catch_up: bool
    reached_step: int
    reached_quorum_id: int
    has_fetched: bool
    takes_secret: bool
    timeout_ms: int
    rank_addresses: _containers.RepeatedCompositeFieldContainer[RankAddress]
    def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ..., store_address: _Optional[str] = ..., step: _Optional[int] = ..., world_size: _Optional[int] = ..., shrink_only: bool = ..., data: _Optional[str] = ..., commit_failures: _Optional[int] = ..., reconfigure_handles: _Optional[_Iterable[str]] = ..., commit_quorum_id: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., broken_quorum_id: _Optional[int] = ..., may_stand: bool = ..., own_failure: _Optional[str] = ..., own_failures: _Optional[int] = ..., may_catch_up: bool = ..., reached_step: _Optional[int] = ..., reached_quorum_id: _Optional[int] = ..., has_fetched: bool = ..., takes_secret: bool = ..., timeout_ms: _Optional[int] = ..., rank_addresses: _Optional[_Iterable[_Union[RankAddress, _Mapping]]] = ...) -> None: ...

class RankAddress(_message.Message):
    __slots__ = ("group_rank", "address")
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    group_rank: int
    address: str
    def __init__(self, group_rank: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Quorum(_message.Message):
    __slots__ = ("quorum_id", "participants", "created", "round", "stands", "first_quorum_id", "secret", "statement")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STANDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    participants: _containers.RepeatedCompositeFieldContainer[QuorumMember]
    created: _timestamp_pb2.Timestamp
    round: int
    stands: bool
    first_quorum_id: int
    secret: bytes
    statement: Statement
    def __init__(self, quorum_id: _Optional[int] = ..., participants: _Optional[_Iterable[_Union[QuorumMember, _Mapping]]] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., round: _Optional[int] = ..., stands: bool = ..., first_quorum_id: _Optional[int] = ..., secret: _Optional[bytes] = ..., statement: _Optional[_Union[Statement, _Mapping]] = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = ("step", "stands", "digest")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STANDS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    step: int
    stands: bool
    digest: bytes
    def __init__(self, step: _Optional[int] = ..., stands: bool = ..., digest: _Optional[bytes] = ...) -> None: ...

class LighthouseQuorumRequest(_message.Message):
    __slots__ = ("requester",)
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    requester: QuorumMember
    def __init__(self, requester: _Optional[_Union[QuorumMember, _Mapping]] = ...) -> None: ...

class LighthouseQuorumResponse(_message.Message):
    __slots__ = ("quorum",)
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    quorum: Quorum
    def __init__(self, quorum: _Optional[_Union[Quorum, _Mapping]] = ...) -> None: ...

class LighthouseHeartbeatRequest(_message.Message):
    __slots__ = ("replica_id",)
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    def __init__(self, replica_id: _Optional[str] = ...) -> None: ...

class LighthouseHeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("register", "join", "leave", "broken_links", "holds", "identity", "progress")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    BROKEN_LINKS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    register: Register
    join: QuorumMember
    leave: Leave
    broken_links: BrokenLinks
    holds: Holds
    identity: Identity
    progress: Progress
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., join: _Optional[_Union[QuorumMember, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., broken_links: _Optional[_Union[BrokenLinks, _Mapping]] = ..., holds: _Optional[_Union[Holds, _Mapping]] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("quorum_id", "step", "waits_for", "waiting_permille", "heals_from")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    WAITING_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    HEALS_FROM_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    step: int
    waits_for: str
    waiting_permille: int
    heals_from: str
    def __init__(self, quorum_id: _Optional[int] = ..., step: _Optional[int] = ..., waits_for: _Optional[str] = ..., waiting_permille: _Optional[int] = ..., heals_from: _Optional[str] = ...) -> None: ...

class Identity(_message.Message):
    __slots__ = ("job_id", "first_quorum_id", "forms", "protocol")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    FORMS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    first_quorum_id: int
    forms: _containers.RepeatedCompositeFieldContainer[StateForm]
    protocol: int
    def __init__(self, job_id: _Optional[str] = ..., first_quorum_id: _Optional[int] = ..., forms: _Optional[_Iterable[_Union[StateForm, _Mapping]]] = ..., protocol: _Optional[int] = ...) -> None: ...

class StateForm(_message.Message):
    __slots__ = ("digest", "paths", "descriptions", "left_out")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    paths: _containers.RepeatedScalarFieldContainer[str]
    descriptions: _containers.RepeatedScalarFieldContainer[str]
    left_out: int
    def __init__(self, digest: _Optional[bytes] = ..., paths: _Optional[_Iterable[str]] = ..., descriptions: _Optional[_Iterable[str]] = ..., left_out: _Optional[int] = ...) -> None: ...

class Holds(_message.Message):
    __slots__ = ("quorum_id", "round", "step", "gives_up")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GIVES_UP_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    round: int
    step: int
    gives_up: bool
    def __init__(self, quorum_id: _Optional[int] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., gives_up: bool = ...) -> None: ...

class BrokenLinks(_message.Message):
    __slots__ = ("unreachable_replica_ids",)
    UNREACHABLE_REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    unreachable_replica_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unreachable_replica_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("replica_id", "address", "store_address", "world_size", "last_quorum_id", "last_quorum_replica_ids", "last_quorum_round", "last_quorum_stands", "spare", "kill_token", "last_quorum_statement")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAST_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_QUORUM_REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    LAST_QUORUM_ROUND_FIELD_NUMBER: _ClassVar[int]
    LAST_QUORUM_STANDS_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    KILL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAST_QUORUM_STATEMENT_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    address: str
    store_address: str
    world_size: int
    last_quorum_id: int
    last_quorum_replica_ids: _containers.RepeatedScalarFieldContainer[str]
    last_quorum_round: int
    last_quorum_stands: bool
    spare: bool
    kill_token: str
    last_quorum_statement: Statement
    def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ..., store_address: _Optional[str] = ..., world_size: _Optional[int] = ..., last_quorum_id: _Optional[int] = ..., last_quorum_replica_ids: _Optional[_Iterable[str]] = ..., last_quorum_round: _Optional[int] = ..., last_quorum_stands: bool = ..., spare: bool = ..., kill_token: _Optional[str] = ..., last_quorum_statement: _Optional[_Union[Statement, _Mapping]] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason", "step", "quorum_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    reason: str
    step: int
    quorum_id: int
    def __init__(self, reason: _Optional[str] = ..., step: _Optional[int] = ..., quorum_id: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("registered", "quorum", "member_lost", "config_changed", "left_out", "hold", "release")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    MEMBER_LOST_FIELD_NUMBER: _ClassVar[int]
    CONFIG_CHANGED_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    registered: JobConfig
    quorum: Quorum
    member_lost: MemberLost
    config_changed: JobConfig
    left_out: LeftOut
    hold: HoldQuorum
    release: ReleaseQuorum
    def __init__(self, registered: _Optional[_Union[JobConfig, _Mapping]] = ..., quorum: _Optional[_Union[Quorum, _Mapping]] = ..., member_lost: _Optional[_Union[MemberLost, _Mapping]] = ..., config_changed: _Optional[_Union[JobConfig, _Mapping]] = ..., left_out: _Optional[_Union[LeftOut, _Mapping]] = ..., hold: _Optional[_Union[HoldQuorum, _Mapping]] = ..., release: _Optional[_Union[ReleaseQuorum, _Mapping]] = ...) -> None: ...

class HoldQuorum(_message.Message):
    __slots__ = ("quorum_id", "round")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    round: int
    def __init__(self, quorum_id: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class ReleaseQuorum(_message.Message):
    __slots__ = ("quorum_id", "round", "ask_at")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ASK_AT_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    round: int
    ask_at: int
    def __init__(self, quorum_id: _Optional[int] = ..., round: _Optional[int] = ..., ask_at: _Optional[int] = ...) -> None: ...

class LeftOut(_message.Message):
    __slots__ = ("quorum_id", "replica_id", "unreachable_replica_ids", "reason")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    replica_id: str
    unreachable_replica_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, quorum_id: _Optional[int] = ..., replica_id: _Optional[str] = ..., unreachable_replica_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class JobConfig(_message.Message):
    __slots__ = ("min_replicas", "join_timeout_ms", "standing_lease_ms", "progress_interval_ms", "is_watched")
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    JOIN_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    STANDING_LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    IS_WATCHED_FIELD_NUMBER: _ClassVar[int]
    min_replicas: int
    join_timeout_ms: int
    standing_lease_ms: int
    progress_interval_ms: int
    is_watched: bool
    def __init__(self, min_replicas: _Optional[int] = ..., join_timeout_ms: _Optional[int] = ..., standing_lease_ms: _Optional[int] = ..., progress_interval_ms: _Optional[int] = ..., is_watched: bool = ...) -> None: ...

class MemberLost(_message.Message):
    __slots__ = ("quorum_id", "replica_id", "reason", "is_alive", "must_answer")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_ALIVE_FIELD_NUMBER: _ClassVar[int]
    MUST_ANSWER_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    replica_id: str
    reason: str
    is_alive: bool
    must_answer: bool
    def __init__(self, quorum_id: _Optional[int] = ..., replica_id: _Optional[str] = ..., reason: _Optional[str] = ..., is_alive: bool = ..., must_answer: bool = ...) -> None: ...

class SpareRequest(_message.Message):
    __slots__ = ("register", "declined", "taken")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    register: SpareRegister
    declined: Declined
    taken: Taken
    def __init__(self, register: _Optional[_Union[SpareRegister, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ...) -> None: ...

class SpareRegister(_message.Message):
    __slots__ = ("spare_id", "host")
    SPARE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    spare_id: str
    host: str
    def __init__(self, spare_id: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SpareResponse(_message.Message):
    __slots__ = ("registered", "vacancy")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    VACANCY_FIELD_NUMBER: _ClassVar[int]
    registered: SpareRegistered
    vacancy: Vacancy
    def __init__(self, registered: _Optional[_Union[SpareRegistered, _Mapping]] = ..., vacancy: _Optional[_Union[Vacancy, _Mapping]] = ...) -> None: ...

class SpareRegistered(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Vacancy(_message.Message):
    __slots__ = ("group_id", "group_rank", "world_size", "host", "store_address", "attempt", "environment")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    group_rank: int
    world_size: int
    host: str
    store_address: str
    attempt: int
    environment: _containers.ScalarMap[str, str]
    def __init__(self, group_id: _Optional[str] = ..., group_rank: _Optional[int] = ..., world_size: _Optional[int] = ..., host: _Optional[str] = ..., store_address: _Optional[str] = ..., attempt: _Optional[int] = ..., environment: _Optional[_Mapping[str, str]] = ...) -> None: ...

class FillVacancyRequest(_message.Message):
    __slots__ = ("vacancy", "waits")
    VACANCY_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    vacancy: Vacancy
    waits: bool
    def __init__(self, vacancy: _Optional[_Union[Vacancy, _Mapping]] = ..., waits: bool = ...) -> None: ...

class FillVacancyResponse(_message.Message):
    __slots__ = ("spare_id",)
    SPARE_ID_FIELD_NUMBER: _ClassVar[int]
    spare_id: str
    def __init__(self, spare_id: _Optional[str] = ...) -> None: ...

class ManagerQuorumRequest(_message.Message):
    __slots__ = ("group_rank", "step", "checkpoint_metadata", "shrink_only", "init_sync", "commit_failures", "reconfigure_handle", "commit_quorum_id", "fingerprint", "broken_quorum_id", "may_stand", "own_failure", "own_failures", "first_quorum_id", "form", "may_catch_up", "reached_step", "reached_quorum_id", "has_fetched", "takes_secret", "request", "answered")
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_METADATA_FIELD_NUMBER: _ClassVar[int]
    SHRINK_ONLY_FIELD_NUMBER: _ClassVar[int]
    INIT_SYNC_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BROKEN_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    MAY_STAND_FIELD_NUMBER: _ClassVar[int]
    OWN_FAILURE_FIELD_NUMBER: _ClassVar[int]
    OWN_FAILURES_FIELD_NUMBER: _ClassVar[int]
    FIRST_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    MAY_CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    REACHED_STEP_FIELD_NUMBER: _ClassVar[int]
    REACHED_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_FETCHED_FIELD_NUMBER: _ClassVar[int]
    TAKES_SECRET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    group_rank: int
    step: int
    checkpoint_metadata: str
    shrink_only: bool
    init_sync: bool
    commit_failures: int
    reconfigure_handle: str
    commit_quorum_id: int
    fingerprint: bytes
    broken_quorum_id: int
    may_stand: bool
    own_failure: str
    own_failures: int
    first_quorum_id: int
    form: StateForm
    may_catch_up: bool
    reached_step: int
    reached_quorum_id: int
    has_fetched: bool
    takes_secret: bool
    request: int
    answered: int
    def __init__(self, group_rank: _Optional[int] = ..., step: _Optional[int] = ..., checkpoint_metadata: _Optional[str] = ..., shrink_only: bool = ..., init_sync: bool = ..., commit_failures: _Optional[int] = ..., reconfigure_handle: _Optional[str] = ..., commit_quorum_id: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., broken_quorum_id: _Optional[int] = ..., may_stand: bool = ..., own_failure: _Optional[str] = ..., own_failures: _Optional[int] = ..., first_quorum_id: _Optional[int] = ..., form: _Optional[_Union[StateForm, _Mapping]] = ..., may_catch_up: bool = ..., reached_step: _Optional[int] = ..., reached_quorum_id: _Optional[int] = ..., has_fetched: bool = ..., takes_secret: bool = ..., request: _Optional[int] = ..., answered: _Optional[int] = ...) -> None: ...

class ManagerQuorumResponse(_message.Message):
    __slots__ = ("quorum_id", "recover_src_manager_address", "recover_src_replica_rank", "recover_dst_replica_ranks", "store_address", "max_step", "max_replica_rank", "max_world_size", "replica_rank", "replica_world_size", "heal", "commit_failures", "replica_ids", "reconfigure_handles", "healing_replica_ids", "divergence", "stands", "watched", "first_quorum_id", "source_ranks", "source_addresses", "helped_ranks", "max_commit_quorum_id", "begins_to_catch_up", "catches_up", "is_awaited", "secret", "request")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    RECOVER_SRC_MANAGER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECOVER_SRC_REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    RECOVER_DST_REPLICA_RANKS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    REPLICA_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAL_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    HEALING_REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    STANDS_FIELD_NUMBER: _ClassVar[int]
    WATCHED_FIELD_NUMBER: _ClassVar[int]
    FIRST_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RANKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    HELPED_RANKS_FIELD_NUMBER: _ClassVar[int]
    MAX_COMMIT_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    BEGINS_TO_CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    CATCHES_UP_FIELD_NUMBER: _ClassVar[int]
    IS_AWAITED_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    recover_src_manager_address: str
    recover_src_replica_rank: int
    recover_dst_replica_ranks: _containers.RepeatedScalarFieldContainer[int]
    store_address: str
    max_step: int
    max_replica_rank: int
    max_world_size: int
    replica_rank: int
    replica_world_size: int
    heal: bool
    commit_failures: int
    replica_ids: _containers.RepeatedScalarFieldContainer[str]
    reconfigure_handles: _containers.RepeatedScalarFieldContainer[str]
    healing_replica_ids: _containers.RepeatedScalarFieldContainer[str]
    divergence: Divergence
    stands: bool
    watched: bool
    first_quorum_id: int
    source_ranks: _containers.RepeatedScalarFieldContainer[int]
    source_addresses: _containers.RepeatedScalarFieldContainer[str]
    helped_ranks: _containers.RepeatedScalarFieldContainer[int]
    max_commit_quorum_id: int
    begins_to_catch_up: bool
    catches_up: bool
    is_awaited: bool
    secret: bytes
    request: int
    def __init__(self, quorum_id: _Optional[int] = ..., recover_src_manager_address: _Optional[str] = ..., recover_src_replica_rank: _Optional[int] = ..., recover_dst_replica_ranks: _Optional[_Iterable[int]] = ..., store_address: _Optional[str] = ..., max_step: _Optional[int] = ..., max_replica_rank: _Optional[int] = ..., max_world_size: _Optional[int] = ..., replica_rank: _Optional[int] = ..., replica_world_size: _Optional[int] = ..., heal: bool = ..., commit_failures: _Optional[int] = ..., replica_ids: _Optional[_Iterable[str]] = ..., reconfigure_handles: _Optional[_Iterable[str]] = ..., healing_replica_ids: _Optional[_Iterable[str]] = ..., divergence: _Optional[_Union[Divergence, _Mapping]] = ..., stands: bool = ..., watched: bool = ..., first_quorum_id: _Optional[int] = ..., source_ranks: _Optional[_Iterable[int]] = ..., source_addresses: _Optional[_Iterable[str]] = ..., helped_ranks: _Optional[_Iterable[int]] = ..., max_commit_quorum_id: _Optional[int] = ..., begins_to_catch_up: bool = ..., catches_up: bool = ..., is_awaited: bool = ..., secret: _Optional[bytes] = ..., request: _Optional[int] = ...) -> None: ...

class Divergence(_message.Message):
    __slots__ = ("replica_ids", "group_ranks", "kept", "tied", "comparable", "heals")
    REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    TIED_FIELD_NUMBER: _ClassVar[int]
    COMPARABLE_FIELD_NUMBER: _ClassVar[int]
    HEALS_FIELD_NUMBER: _ClassVar[int]
    replica_ids: _containers.RepeatedScalarFieldContainer[str]
    group_ranks: _containers.RepeatedScalarFieldContainer[int]
    kept: _containers.RepeatedScalarFieldContainer[str]
    tied: bool
    comparable: bool
    heals: bool
    def __init__(self, replica_ids: _Optional[_Iterable[str]] = ..., group_ranks: _Optional[_Iterable[int]] = ..., kept: _Optional[_Iterable[str]] = ..., tied: bool = ..., comparable: bool = ..., heals: bool = ...) -> None: ...

class CheckpointMetadataRequest(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class CheckpointMetadataResponse(_message.Message):
    __slots__ = ("checkpoint_metadata",)
    CHECKPOINT_METADATA_FIELD_NUMBER: _ClassVar[int]
    checkpoint_metadata: str
    def __init__(self, checkpoint_metadata: _Optional[str] = ...) -> None: ...

class ShouldCommitRequest(_message.Message):
    __slots__ = ("should_commit", "group_rank", "step", "stop", "passed", "has_fetched", "went_well")
    SHOULD_COMMIT_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    HAS_FETCHED_FIELD_NUMBER: _ClassVar[int]
    WENT_WELL_FIELD_NUMBER: _ClassVar[int]
    should_commit: bool
    group_rank: int
    step: int
    stop: bool
    passed: bool
    has_fetched: bool
    went_well: bool
    def __init__(self, should_commit: bool = ..., group_rank: _Optional[int] = ..., step: _Optional[int] = ..., stop: bool = ..., passed: bool = ..., has_fetched: bool = ..., went_well: bool = ...) -> None: ...

class ShouldCommitResponse(_message.Message):
    __slots__ = ("should_commit", "step", "stop", "passed", "has_fetched")
    SHOULD_COMMIT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    HAS_FETCHED_FIELD_NUMBER: _ClassVar[int]
    should_commit: bool
    step: int
    stop: bool
    passed: bool
    has_fetched: bool
    def __init__(self, should_commit: bool = ..., step: _Optional[int] = ..., stop: bool = ..., passed: bool = ..., has_fetched: bool = ...) -> None: ...

class KillRequest(_message.Message):
    __slots__ = ("msg",)
    MSG_FIELD_NUMBER: _ClassVar[int]
    msg: str
    def __init__(self, msg: _Optional[str] = ...) -> None: ...

class KillResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankSessionRequest(_message.Message):
    __slots__ = ("register", "join", "vote", "leave", "holds", "probed", "received")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    register: RankRegister
    join: ManagerQuorumRequest
    vote: ShouldCommitRequest
    leave: Leave
    holds: Holds
    probed: PeersProbed
    received: int
    def __init__(self, register: _Optional[_Union[RankRegister, _Mapping]] = ..., join: _Optional[_Union[ManagerQuorumRequest, _Mapping]] = ..., vote: _Optional[_Union[ShouldCommitRequest, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., holds: _Optional[_Union[Holds, _Mapping]] = ..., probed: _Optional[_Union[PeersProbed, _Mapping]] = ..., received: _Optional[int] = ...) -> None: ...

class RankRegister(_message.Message):
    __slots__ = ("group_rank", "process", "address", "replica_id")
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    group_rank: int
    process: bytes
    address: str
    replica_id: str
    def __init__(self, group_rank: _Optional[int] = ..., process: _Optional[bytes] = ..., address: _Optional[str] = ..., replica_id: _Optional[str] = ...) -> None: ...

class RankSessionResponse(_message.Message):
    __slots__ = ("registered", "quorum", "member_lost", "vote", "group_lost", "step_lost", "left_out", "hold", "release", "suspected", "probe", "received")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    MEMBER_LOST_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    GROUP_LOST_FIELD_NUMBER: _ClassVar[int]
    STEP_LOST_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    registered: RankRegistered
    quorum: ManagerQuorumResponse
    member_lost: MemberLost
    vote: ShouldCommitResponse
    group_lost: GroupLost
    step_lost: StepLost
    left_out: LeftOut
    hold: HoldQuorum
    release: ReleaseQuorum
    suspected: RankSuspected
    probe: ProbePeers
    received: int
    def __init__(self, registered: _Optional[_Union[RankRegistered, _Mapping]] = ..., quorum: _Optional[_Union[ManagerQuorumResponse, _Mapping]] = ..., member_lost: _Optional[_Union[MemberLost, _Mapping]] = ..., vote: _Optional[_Union[ShouldCommitResponse, _Mapping]] = ..., group_lost: _Optional[_Union[GroupLost, _Mapping]] = ..., step_lost: _Optional[_Union[StepLost, _Mapping]] = ..., left_out: _Optional[_Union[LeftOut, _Mapping]] = ..., hold: _Optional[_Union[HoldQuorum, _Mapping]] = ..., release: _Optional[_Union[ReleaseQuorum, _Mapping]] = ..., suspected: _Optional[_Union[RankSuspected, _Mapping]] = ..., probe: _Optional[_Union[ProbePeers, _Mapping]] = ..., received: _Optional[int] = ...) -> None: ...

class RankRegistered(_message.Message):
    __slots__ = ("replica_id",)
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    def __init__(self, replica_id: _Optional[str] = ...) -> None: ...

class ProbePeers(_message.Message):
    __slots__ = ("number", "replica_ids", "addresses", "must_listen", "is_repeated")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    MUST_LISTEN_FIELD_NUMBER: _ClassVar[int]
    IS_REPEATED_FIELD_NUMBER: _ClassVar[int]
    number: int
    replica_ids: _containers.RepeatedScalarFieldContainer[str]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    must_listen: _containers.RepeatedScalarFieldContainer[str]
    is_repeated: bool
    def __init__(self, number: _Optional[int] = ..., replica_ids: _Optional[_Iterable[str]] = ..., addresses: _Optional[_Iterable[str]] = ..., must_listen: _Optional[_Iterable[str]] = ..., is_repeated: bool = ...) -> None: ...

class PeersProbed(_message.Message):
    __slots__ = ("number", "silent_replica_ids")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SILENT_REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    silent_replica_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., silent_replica_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RankSuspected(_message.Message):
    __slots__ = ("group_rank", "reason")
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group_rank: int
    reason: str
    def __init__(self, group_rank: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class StepLost(_message.Message):
    __slots__ = ("quorum_id",)
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    def __init__(self, quorum_id: _Optional[int] = ...) -> None: ...

class GroupLost(_message.Message):
    __slots__ = ("reason", "is_foreign")
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_FOREIGN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    is_foreign: bool
    def __init__(self, reason: _Optional[str] = ..., is_foreign: bool = ...) -> None: ...
