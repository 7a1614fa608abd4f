"""A store by URL: against a real S3 server, real HTTP servers, a folder, and memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from m2ncompile.build import action_key, build, open_store
from m2ncompile.cli.app import app
from m2ncompile.errors import M2nCompileError, PlanError, StoreError
from m2ncompile.opening import open_plan
from m2ncompile.plan import Plan
from m2ncompile.plan_check import load
from m2ncompile.remote import open_remote, parse
from m2ncompile.sharing import push
from m2ncompile.spec import load_spec
from m2ncompile.store import ActionKey, Store
from m2ncompile.store.records import encode_action
from tests.plans import make_plan
from tests.remotes import (
    CREDENTIALS,
    Bucket,
    Folder,
    Memory,
    closed_port,
    http_server,
    long_server,
    s3_server,
    silent_server,
    with_digest,
)
from tests.test_cli import SPEC, run

ROOT = Path(__file__).parents[1]
#: A spec and its plan, which need not be compiled again.
SPEC_FILE = ROOT / "plans" / "gpt2-fsdp4-tp2.toml"
PLAN = load(ROOT / "plans" / "gpt2-fsdp4-tp2.plan.json")
KEY = action_key(load_spec(SPEC_FILE))
OTHER = make_plan()

Place = Bucket | Folder | Memory


def object_path(digest: str) -> str:
    return f"objects/{digest[:2]}/{digest}.json"


def action_path(key: ActionKey) -> str:
    return f"actions/{key.digest[:2]}/{key.digest}.json"


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bucket:
    """An empty bucket that keeps every version of what is written."""
    for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": s3}).items():
        monkeypatch.setenv(name, value)
    return Bucket("b" + sha256(request.node.nodeid.encode()).hexdigest()[:20])


@pytest.fixture(params=["s3", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        found: Bucket = request.getfixturevalue("bucket")
        return found
    return Folder(tmp_path / "remote") if request.param == "file" else Memory(tmp_path.name)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "m2ncompile-cache")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiling gives the plan that is checked in; the models that were compiled."""
    names: list[str] = []

    def build_plan(spec: Any, progress: Any) -> Plan:
        names.append(spec.model.name)
        return PLAN

    monkeypatch.setattr("m2ncompile.compile.pipeline.build_plan", build_plan)
    return names


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """The command line in this process: what it printed; its error ends what is on stderr."""

    def run_app(*args: object, code: int = 0) -> tuple[str, str]:
        error, ended = "", 0
        try:
            ended = app([str(arg) for arg in args], standalone_mode=False) or 0
        except M2nCompileError as raised:
            error, ended = f"error: {raised}\n", raised.exit_code
        out, warnings = capsys.readouterr()
        assert ended == code, out + warnings + error
        return out, warnings + error

    return run_app


def pushed(place: Place, plan: Plan = PLAN, *keys: ActionKey) -> None:
    push(open_remote(place.url), plan.digest, plan.encoded, keys or [KEY])


# --- addresses


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("/mnt/plans", "expected file:///FOLDER, s3://"),
        ("ftp://host/plans", "expected file:///FOLDER, s3://"),
        ("simplecache::s3://bucket", "expected file:///FOLDER, s3://"),
        ("file://plans", "expected an absolute path"),
        ("s3://", "expected a bucket or host"),
        ("http://host/plans?version=1", "without ? and #"),
        ("http://[host", "Invalid IPv6"),
    ],
)
def test_a_bad_url_is_refused_by_all_that_take_one(url: str, says: str, tmp_path: Path) -> None:
    for args in (["build", SPEC_FILE], ["cache", "push"], ["cache", "pull"]):
        error = run(*args, "--remote", url, code=2).stderr
        assert f"can't use the remote store\n  {url}: " in error
        assert says in error
    assert says in run("cache", "push", code=2, M2NCOMPILE_REMOTE=url).stderr


def test_a_url_with_credentials_is_refused_and_not_repeated() -> None:
    with pytest.raises(StoreError, match="must not hold credentials") as caught:
        parse("https://me:secret@host/plans")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "module"), [("s3://b", "s3fs"), ("gs://b", "gcsfs"), ("https://h", "aiohttp")]
)
def test_a_missing_package_is_named_with_the_command_that_brings_it(
    url: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StoreError) as caught:
        parse(url)
    (problem,) = caught.value.problems
    assert f"needs the package {module}" in problem.message
    assert problem.fix is not None
    (extra,) = re.findall(r"^pip install 'm2ncompile\[(\w+)\]'$", problem.fix)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.split(r"\W", need)[0] for need in extras["optional-dependencies"][extra]] == [module]


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_bad_time_limit_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2NCOMPILE_REMOTE_TIMEOUT", text)
    with pytest.raises(StoreError, match=f"expected seconds, 0 to 86400; got {text}"):
        open_remote("memory://x")


def test_commands_that_need_a_remote_say_so() -> None:
    for args in (["build", "--push", SPEC_FILE], ["cache", "push"], ["cache", "pull"]):
        assert "M2NCOMPILE_REMOTE" in run(*args, code=2).stderr
    for args in (["--no-cache", "--push"], ["--no-cache", "--require-cache"], ["--frozen"]):
        more = ["--push"] if args == ["--frozen"] else []
        run("build", *args, *more, "--remote", "memory://x", SPEC_FILE, code=2)


# --- what lies there


def test_a_remote_is_laid_out_as_the_store(place: Place, store: Store) -> None:
    store.record(KEY, store.put(PLAN.encoded))
    pushed(place)
    assert place.files() == files(store.root)
    remote = open_remote(place.url + "/")
    assert remote.lookup(KEY) == PLAN.digest
    assert remote.get(PLAN.digest) == PLAN.encoded
    assert remote.digests() == remote.digests(PLAN.digest[:6]) == [PLAN.digest]
    other = ActionKey.of({"spec": "other"})
    assert (remote.lookup(other), remote.get("0" * 64), remote.digests("00")) == (None, None, [])


def test_what_is_there_and_sound_is_not_written_again(bucket: Bucket) -> None:
    remote = open_remote(bucket.url)
    first = push(remote, PLAN.digest, PLAN.encoded, [KEY])
    assert (first.written, first.actions) == (True, 1)
    again = push(remote, PLAN.digest, PLAN.encoded, [KEY])
    assert (again.written, again.actions) == (False, 0)
    assert len(bucket.writes()) == 2


def test_a_dry_run_writes_nothing(place: Place) -> None:
    remote = open_remote(place.url)
    done = push(remote, PLAN.digest, PLAN.encoded, [KEY], dry_run=True)
    assert (done.written, done.actions) == (True, 1)
    assert place.files() == {}


def test_what_is_damaged_there_is_replaced(place: Place) -> None:
    key = ActionKey.of({"spec": "other"})
    for data in (b"", PLAN.encoded[:-1], OTHER.encoded):
        place.write(object_path(PLAN.digest), data)
        place.write(action_path(KEY), data)
        place.write(action_path(key), encode_action(key, OTHER.digest))
        done = push(open_remote(place.url), PLAN.digest, PLAN.encoded, [KEY, key])
        assert (done.written, done.actions) == (True, 2)
        assert place.files() == {
            object_path(PLAN.digest): PLAN.encoded,
            action_path(KEY): encode_action(KEY, PLAN.digest),
            action_path(key): encode_action(key, PLAN.digest),
        }


def test_the_plan_is_there_before_what_leads_to_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = open_remote(place.url)
    seen: list[dict[str, bytes]] = []
    monkeypatch.setattr(remote, "record", lambda key, digest: seen.append(place.files()))
    push(remote, PLAN.digest, PLAN.encoded, [KEY])
    assert seen == [{object_path(PLAN.digest): PLAN.encoded}]


@pytest.mark.parametrize("change", ["flipped", "cut", "other", "empty", "none"])
def test_a_plan_that_does_not_fit_its_digest_is_refused(
    place: Place, store: Store, compiled: list[str], change: str, call: Callable[..., Any]
) -> None:
    """By every reader, with one message; what is built or kept here is never the poison."""
    middle = len(PLAN.encoded) // 2
    flipped = bytearray(PLAN.encoded)
    flipped[middle] ^= 1
    poison = {
        "flipped": bytes(flipped),
        "cut": PLAN.encoded[:middle],
        "other": OTHER.encoded,
        "empty": b"",
        "none": b"\x00" * 1000,
    }[change]
    pushed(place)
    place.write(object_path(PLAN.digest), poison)
    where = f"{place.url}/{object_path(PLAN.digest)}: expected the plan {PLAN.digest}, got"
    with pytest.raises(StoreError) as caught:
        open_plan(PLAN.digest, store.root, place.url)
    assert where in str(caught.value)
    if change == "other":
        assert f"its bytes are those of {OTHER.digest}" in str(caught.value)
    _, error = call("cache", "pull", PLAN.digest, "--remote", place.url, code=2)
    assert where in error
    _, error = call("cache", "pull", SPEC_FILE, "--remote", place.url, code=2)
    assert where in error
    assert files(store.root) == {}

    out, error = call("build", SPEC_FILE, "--remote", place.url)
    assert error.count("warning:") == 1
    assert f"warning: the remote store is not used: the remote store is damaged\n  {where}" in error
    assert "(from remote)" not in out
    assert compiled == ["gpt2"]
    assert files(store.root) == {
        object_path(PLAN.digest): PLAN.encoded,
        action_path(KEY): encode_action(KEY, PLAN.digest),
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff",
        encode_action(ActionKey.of({"spec": "other"}), PLAN.digest),
        msgspec.json.encode({"key": KEY, "plan": "../../../etc/passwd"}),
        msgspec.json.encode({"key": KEY, "plan": PLAN.digest, "more": 1}),
    ],
    ids=["empty", "open", "deep", "not-utf8", "another", "path", "more"],
)
def test_an_entry_that_is_none_is_refused(
    place: Place, store: Store, compiled: list[str], data: bytes, call: Callable[..., Any]
) -> None:
    pushed(place)
    place.write(action_path(KEY), data)
    where = f"{place.url}/{action_path(KEY)}: expected the entry of key {KEY.digest}, got"
    _, error = call("cache", "pull", SPEC_FILE, "--remote", place.url, code=2)
    assert where in error
    assert files(store.root) == {}
    _, error = call("build", SPEC_FILE, "--remote", place.url)
    assert where in error
    assert compiled == ["gpt2"]


def of_inputs(**changes: Any) -> Plan:
    """A consistent plan whose inputs are those of the spec but for `changes`, by section."""
    inputs = PLAN.inputs
    for name, value in changes.items():
        old = getattr(inputs, name)
        new = value if isinstance(value, str) else msgspec.structs.replace(old, **value)
        inputs = msgspec.structs.replace(inputs, **{name: new})
    return make_plan(inputs=inputs)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"compiler": "0.0.1"}, "compiler"),
        ({"model": {"config": "0" * 64}}, "model.config"),
        ({"model": {"name": "other"}}, "model.name"),
        ({"engine": {"dtype": "bfloat16"}}, "engine.dtype"),
        ({"engine": {"target": "cuda-sm100"}}, "engine.target"),
        ({"trainer": {"rules": ()}}, "trainer.rules"),
        ({"limits": {"stack_bytes": 1}}, "limits.stack_bytes"),
    ],
)
@pytest.mark.parametrize("here", [False, True], ids=["fetched", "here"])
def test_an_entry_that_leads_to_a_plan_of_other_inputs_is_refused(
    tmp_path: Path,
    store: Store,
    compiled: list[str],
    changes: Any,
    path: str,
    here: bool,
    call: Callable[..., Any],
) -> None:
    """Also where the store here has that plan already."""
    place, plan = Folder(tmp_path / "remote"), of_inputs(**changes)
    pushed(place, plan)
    if here:
        store.put(plan.encoded)
    before = files(store.root)
    where = f"{place.url}/{action_path(KEY)}: expected a plan of the spec's inputs, got the plan "
    _, error = call("cache", "pull", SPEC_FILE, "--remote", place.url, code=2)
    assert f"{where}{plan.digest}, which differs in {path}" in error
    assert files(store.root) == before
    out, error = call("build", SPEC_FILE, "--remote", place.url)
    assert f"{where}{plan.digest}, which differs in {path}" in error
    assert PLAN.digest in out
    assert compiled == ["gpt2"]
    assert store.lookup(KEY) == PLAN.digest
    assert store.has(plan.digest) is here


def test_a_pull_of_plans_brings_no_claims(
    tmp_path: Path, store: Store, compiled: list[str], call: Callable[..., Any]
) -> None:
    """An action is checked against its spec, or not taken at all."""
    place = Folder(tmp_path / "remote")
    pushed(place, OTHER)
    call("cache", "pull", "--remote", place.url)
    assert list(files(store.root)) == [object_path(OTHER.digest)]
    build(SPEC_FILE, store, lambda *_: None)
    assert compiled == ["gpt2"]


def test_a_plan_that_is_whole_and_inconsistent_is_refused(tmp_path: Path, store: Store) -> None:
    body = PLAN.encoded.replace(b'"major":1', b'"major":2')
    body = body[: body.rindex(b'"digest":')]
    digest = sha256(body).hexdigest()
    place = Folder(tmp_path / "remote")
    place.write(object_path(digest), body + f'"digest":"{digest}"\n}}\n'.encode())
    place.write(action_path(KEY), encode_action(KEY, digest))
    with pytest.raises(StoreError, match=r"plan format 2\.0; this m2ncompile reads 1\.x"):
        open_plan(digest, store.root, place.url)
    assert files(store.root) == {}


def test_what_is_too_large_is_not_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2ncompile.remote.remote.MAX_OBJECT_BYTES", len(PLAN.encoded) - 1)
    pushed(place)
    with pytest.raises(StoreError, match=f"at most {len(PLAN.encoded) - 1}|more than"):
        open_remote(place.url).get(PLAN.digest)
    monkeypatch.setattr("m2ncompile.remote.remote.MAX_OBJECT_BYTES", len(PLAN.encoded))
    assert open_remote(place.url).get(PLAN.digest) == PLAN.encoded


def test_a_server_that_sends_too_much_is_cut_off() -> None:
    with long_server(b" " * 65536, 1024) as (url, cut):
        with pytest.raises(StoreError, match="more than 1048576 bytes, which are not read"):
            open_remote(url).lookup(KEY)
        assert cut.get(timeout=60)


def test_links_in_a_folder_lead_nowhere(tmp_path: Path) -> None:
    place = Folder(tmp_path / "remote")
    pushed(place)
    (tmp_path / "remote" / "objects").rename(tmp_path / "elsewhere")
    (tmp_path / "remote" / "objects").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a symbolic link"):
        open_remote(place.url).get(PLAN.digest)


# --- builds


def test_what_is_missing_here_comes_from_the_remote(
    place: Place, store: Store, compiled: list[str], call: Callable[..., Any]
) -> None:
    pushed(place)
    out, error = call("build", SPEC_FILE, "--remote", place.url, "--json")
    (result,) = json.loads(out)["plans"]
    assert (result["cached"], result["from_remote"], result["pushed"]) == (True, True, False)
    assert result["path"] == str(store.path(PLAN.digest))
    assert (compiled, error) == ([], "")
    assert files(store.root) == place.files()
    out, error = call("build", SPEC_FILE, "--remote", closed_port())
    assert out.startswith(f"{SPEC_FILE}: gpt2 (cached)\n")
    assert (compiled, error) == ([], "")


def test_a_hit_from_remote_says_so(
    bucket: Bucket, compiled: list[str], call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(bucket)
    monkeypatch.setenv("M2NCOMPILE_REMOTE", bucket.url)
    assert call("build", SPEC_FILE)[0].startswith(f"{SPEC_FILE}: gpt2 (from remote)\n")
    assert compiled == []


def test_a_build_pushes_only_when_asked(
    place: Place, store: Store, compiled: list[str], call: Callable[..., Any]
) -> None:
    out, _ = call("build", SPEC_FILE, "--remote", place.url)
    assert place.files() == {}
    assert "pushed" not in out
    out, _ = call("build", SPEC_FILE, "--remote", place.url, "--push")
    assert "pushed" in out
    assert place.files() == files(store.root)
    assert compiled == ["gpt2"]


def test_a_push_after_a_refusal_mends_the_remote(
    place: Place, compiled: list[str], call: Callable[..., Any]
) -> None:
    pushed(place, OTHER)
    _, error = call("build", SPEC_FILE, "--remote", place.url, "--push")
    assert "warning: the remote store is not used" in error
    assert open_remote(place.url).lookup(KEY) == PLAN.digest


def test_a_hit_here_needs_no_remote_and_imports_no_protocol(store: Store) -> None:
    store.record(KEY, store.put(PLAN.encoded))
    script = (
        "import sys; from m2ncompile.cli import app; "
        f"app.app(['build', {str(SPEC_FILE)!r}, '--remote', sys.argv[1]], standalone_mode=False); "
        f"app.app(['show', {PLAN.digest!r}, '--json'], standalone_mode=False); "
        "sys.exit(str({'fsspec', 'aiohttp', 's3fs', 'botocore'} & set(sys.modules)))"
    )
    for url in ("s3://nobody/here", closed_port()):
        found = subprocess.run(
            [sys.executable, "-c", script, url],
            capture_output=True,
            text=True,
            env=os.environ | {"M2NCOMPILE_REMOTE": url},
        )
        assert found.stderr == "set()\n"
        assert "(cached)" in found.stdout


@pytest.mark.parametrize("what", ["closed", "file"])
def test_a_lost_remote_is_warned_of_once(
    tmp_path: Path, compiled: list[str], what: str, call: Callable[..., Any]
) -> None:
    specs, out = tmp_path / "specs", tmp_path / "out"
    specs.mkdir()
    text = SPEC_FILE.read_text().replace("models/", f"{ROOT}/plans/models/")
    (specs / "a.toml").write_text(text)
    (specs / "b.toml").write_text(f"{text}\n[limits]\nstack_bytes = 4096\n")
    (tmp_path / "file").write_text("")
    url = closed_port() if what == "closed" else f"file://{tmp_path}/file"
    args = ["build", specs, "--remote", url, "-o", out, "--cache"]
    for cache, more in (("a", []), ("b", ["--locked"]), ("c", ["--push"])):
        if what == "closed" and "--push" in more:
            continue  # nothing is pushed over http
        compiled.clear()
        _, error = call(*args, tmp_path / cache, *more)
        assert error.count("warning:") == 1
        assert "warning: the remote store is not used: can't read the remote store\n" in error
        assert ("Cannot connect" if what == "closed" else "expected a folder") in error
        assert compiled == ["gpt2", "gpt2"]


def test_a_required_store_that_fails_is_an_error(
    tmp_path: Path, store: Store, compiled: list[str], call: Callable[..., Any]
) -> None:
    def fails(*args: object) -> str:
        found: str = call("build", SPEC_FILE, "--require-cache", *args, code=2)[1]
        assert "warning:" not in found
        return found

    assert "can't read the remote store" in fails("--remote", closed_port())
    (tmp_path / "file").write_text("")
    assert "expected a folder, found a file" in fails("--cache", tmp_path / "file" / "cache")
    place = Folder(tmp_path / "remote")
    pushed(place)
    place.write(object_path(PLAN.digest), b"")
    assert "the remote store is damaged" in fails("--remote", place.url)
    assert compiled == []
    (tmp_path / "none" / "actions").mkdir(parents=True)
    (tmp_path / "none" / "objects").write_text("")
    assert "can't write the store" in fails("--cache", tmp_path / "none")
    place = Folder(tmp_path / "other")
    place.write("objects", b"")
    error = fails("--remote", place.url, "--push", "--cache", tmp_path / "more")
    assert "the remote store" in error
    call("build", SPEC_FILE, "--require-cache", "--remote", f"file://{tmp_path}/new", "--push")


def test_no_cache_asks_nobody(compiled: list[str], call: Callable[..., Any]) -> None:
    _, error = call("build", SPEC_FILE, "--no-cache", "--remote", closed_port())
    assert (error, compiled) == ("", ["gpt2"])


def test_locked_reads_the_remote_and_writes_nothing(
    place: Place, store: Store, compiled: list[str], call: Callable[..., Any]
) -> None:
    pushed(place)
    before = place.files()
    out, _ = call("build", "--locked", SPEC_FILE, "--remote", place.url)
    assert "is what" in out
    assert compiled == []
    assert files(store.root) == {}
    assert place.files() == before


def test_a_diff_of_a_spec_reads_the_remote(
    place: Place, compiled: list[str], call: Callable[..., Any]
) -> None:
    pushed(place)
    out, _ = call("diff", PLAN.digest, SPEC_FILE, "--remote", place.url)
    assert out.startswith("same program: the plans are identical")
    assert compiled == []


# --- plans by digest


def test_a_plan_by_its_whole_digest_comes_from_the_remote(
    place: Place, store: Store, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(place)
    with pytest.raises(StoreError, match="no such plan"):
        open_plan(PLAN.digest)
    with pytest.raises(StoreError, match="no such plan") as caught:
        open_plan(PLAN.digest[:63], remote=place.url)
    assert place.url not in str(caught.value)  # it was not asked
    monkeypatch.setenv("M2NCOMPILE_REMOTE", place.url)
    with pytest.raises(StoreError, match=f"no object in {store.root}, and none in {place.url}"):
        open_plan("0" * 64)
    assert files(store.root) == {}
    assert PLAN.digest in call("show", PLAN.digest)[0]
    monkeypatch.setenv("M2NCOMPILE_REMOTE", closed_port())
    assert open_plan(PLAN.digest).encoded == PLAN.encoded
    with pytest.raises(StoreError, match="can't read the remote store"):
        open_plan("0" * 64)


def test_a_damaged_plan_here_is_mended_by_the_remote(tmp_path: Path, store: Store) -> None:
    place = Folder(tmp_path / "remote")
    pushed(place)
    store.path(store.put(PLAN.encoded)).write_bytes(b"x")
    assert open_plan(PLAN.digest, store.root, place.url).encoded == PLAN.encoded
    assert store.get(PLAN.digest) == PLAN.encoded


# --- push and pull


@pytest.fixture
def filled(store: Store) -> Store:
    """Two plans; two specs lead to the first."""
    store.record(KEY, store.put(PLAN.encoded))
    store.record(ActionKey.of({"spec": "other"}), PLAN.digest)
    store.put(OTHER.encoded)
    return store


def test_push_and_pull_move_what_is_missing(
    place: Place, filled: Store, tmp_path: Path, call: Callable[..., Any]
) -> None:
    out, _ = call("cache", "push", "--remote", place.url, "--dry-run")
    assert "would push 2 plans" in out
    assert place.files() == {}
    out, _ = call("cache", "push", "--remote", place.url)
    assert f"pushed {PLAN.digest}" in out
    assert f"and 2 entries to {place.url}; 0 plans were there" in out
    assert place.files() == files(filled.root)
    document = json.loads(call("cache", "push", "--remote", place.url, "--json")[0])
    assert document["schema"] == "m2ncompile.cache.push/1"
    assert [(p["written"], p["actions"]) for p in document["plans"]] == [(False, 0)] * 2

    other = ["--remote", place.url, "--cache", tmp_path / "other"]
    assert "would pull 2 plans" in call("cache", "pull", *other, "--dry-run")[0]
    assert not (tmp_path / "other").exists()
    assert f"pulled {OTHER.digest}" in call("cache", "pull", OTHER.digest[:6], *other)[0]
    out, _ = call("cache", "pull", *other)
    assert f"pulled 1 plans from {place.url}; 1 were in" in out
    call("cache", "pull", SPEC_FILE, *other)
    assert open_store(tmp_path / "other").lookup(KEY) == PLAN.digest
    document = json.loads(call("cache", "pull", SPEC_FILE, *other, "--json")[0])
    assert document["schema"] == "m2ncompile.cache.pull/1"
    assert document["plans"] == [{"digest": PLAN.digest, "fetched": False}]


@pytest.mark.parametrize("how", ["file", "digest", "spec"])
def test_push_takes_plans_and_specs(
    place: Place, filled: Store, tmp_path: Path, how: str, call: Callable[..., Any]
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(PLAN.encoded)
    given = {"file": path, "digest": PLAN.digest[:8], "spec": SPEC_FILE}[how]
    call("cache", "push", given, "--remote", place.url)
    assert place.files() == {
        name: data for name, data in files(filled.root).items() if OTHER.digest not in name
    }


def test_push_names_what_it_can_not_read_and_sends_the_rest(
    tmp_path: Path, filled: Store, call: Callable[..., Any]
) -> None:
    place = Folder(tmp_path / "remote")
    filled.path(OTHER.digest).write_bytes(b"x")
    _, error = call("cache", "push", "--remote", place.url, code=2)
    assert f"1 plans were not pushed\n  {filled.path(OTHER.digest)}" in error
    assert object_path(PLAN.digest) in place.files()
    (tmp_path / "empty").mkdir()
    args = ["--cache", tmp_path / "empty", "--remote", place.url]
    _, error = call("cache", "push", SPEC_FILE, *args, code=2)
    assert f"{SPEC_FILE}: its plan is not in the store\n    build it: m2ncompile build" in error


def test_push_of_bad_references_names_them_and_sends_the_rest(
    tmp_path: Path, filled: Store, call: Callable[..., Any]
) -> None:
    place, good, cut = Folder(tmp_path / "remote"), tmp_path / "good.json", tmp_path / "cut.json"
    good.write_bytes(OTHER.encoded)
    cut.write_bytes(OTHER.encoded[:-9])
    specs = tmp_path / "specs"
    specs.mkdir()
    (specs / "bad.toml").write_text("[model]\npth = 1")
    (specs / "good.toml").write_text(
        SPEC_FILE.read_text().replace('path = "', f'path = "{SPEC_FILE.parent}/')
    )
    (tmp_path / "empty").mkdir()
    bad = [cut, "no-digest", "0" * 9, tmp_path / "none.toml", tmp_path / "empty"]
    _, error = call("cache", "push", *bad, specs, good, "--remote", place.url, code=2)
    assert "error: 6 plans were not pushed\n" in error
    for where in (*bad, specs / "bad.toml"):
        assert f"\n  {where}: " in error
    assert error.count(str(cut)) == 1 and "pth" in error
    assert {object_path(PLAN.digest), object_path(OTHER.digest)} <= place.files().keys()


def test_pull_names_what_it_refuses_and_brings_the_rest(
    place: Place, store: Store, call: Callable[..., Any]
) -> None:
    pushed(place)
    pushed(place, OTHER, ActionKey.of({"spec": "other"}))
    place.write(object_path(OTHER.digest), PLAN.encoded)
    _, error = call("cache", "pull", "--remote", place.url, code=2)
    assert "1 plans were not pulled" in error
    assert f"{place.url}/{object_path(OTHER.digest)}: expected the plan {OTHER.digest}" in error
    assert files(store.root) == {object_path(PLAN.digest): PLAN.encoded}
    for absent in ("0" * 64, "0" * 8):
        assert "no " in call("cache", "pull", absent, "--remote", place.url, code=2)[1]


def test_a_spec_that_the_remote_does_not_know_is_named(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    (tmp_path / "none").mkdir()
    _, error = call("cache", "pull", SPEC_FILE, "--remote", f"file://{tmp_path}/none", code=2)
    assert f"{SPEC_FILE}: the remote store has no plan of its inputs (key {KEY.digest})" in error


# --- http


def test_over_http_plans_are_read(
    tmp_path: Path, store: Store, compiled: list[str], call: Callable[..., Any]
) -> None:
    pushed(Folder(tmp_path / "remote"))
    with http_server(tmp_path) as (server, _):
        url = f"{server}/remote"
        assert "(from remote)" in call("build", SPEC_FILE, "--remote", url)[0]
        again = ["--remote", url, "--cache"]
        call("cache", "pull", PLAN.digest, *again, tmp_path / "b")
        call("cache", "pull", SPEC_FILE, *again, tmp_path / "c")
        assert open_plan(PLAN.digest, tmp_path / "d", url).encoded == PLAN.encoded
        for plans in ([], [PLAN.digest[:8]]):
            _, error = call("cache", "pull", *plans, *again, tmp_path / "e", code=2)
            assert f"{url}: over http it can't be listed\n    name a plan by all 64" in error
    assert compiled == []
    assert open_store(tmp_path / "c").lookup(KEY) == PLAN.digest


def test_over_http_nothing_is_pushed_or_even_read(
    tmp_path: Path, compiled: list[str], call: Callable[..., Any]
) -> None:
    (tmp_path / "file").write_text("")
    with http_server(tmp_path) as (url, asked):
        for args in (["cache", "push"], ["build", "--push", tmp_path / "none.toml"]):
            args = [*args, "--remote", url, "--cache", tmp_path / "file"]
            _, error = call(*args, code=2)
            assert error.startswith(
                f"error: can't write the remote store\n  {url}: over http it is read-only\n"
            )
        assert asked == []
    assert compiled == []


def test_a_server_that_fails_is_no_miss(tmp_path: Path) -> None:
    from http.server import SimpleHTTPRequestHandler

    class Failing(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503)

        def log_message(self, *args: Any) -> None:
            pass

    with http_server(tmp_path, Failing) as (url, _):
        with pytest.raises(StoreError, match="503"):
            open_remote(url).lookup(KEY)
        with pytest.raises(PlanError, match="503"):
            open_plan(f"{url}/a.plan.json")


def test_a_plan_by_a_url(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(OTHER.encoded)
    with http_server(tmp_path) as (url, _):
        assert open_plan(f"{url}/a.json").digest == OTHER.digest
        assert open_plan(f"simplecache::{url}/a.json").digest == OTHER.digest
        with pytest.raises(PlanError, match="FileNotFoundError"):
            open_plan(f"{url}/none.json")
    assert open_plan((tmp_path / "a.json").as_uri()).digest == OTHER.digest
    with pytest.raises(PlanError, match="Connect call failed"):
        open_plan(f"{closed_port()}/a.json")


@pytest.mark.parametrize("url", ["https://me:secret@host/a", "simplecache::s3://me:secret@host/a"])
def test_a_plan_by_a_url_with_credentials_is_refused_and_not_repeated(url: str) -> None:
    error = run("show", url, code=2).stderr
    assert "://host: a URL must not hold credentials" in error and "secret" not in error


def test_a_plan_by_a_url_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(url: str) -> None:
        raise ImportError("Please install its package")

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for url, extra in (("gs://b/x", "gcs"), ("https://h/x?version=1", "http")):
        with pytest.raises(PlanError) as caught:
            open_plan(url)
        assert f"pip install 'm2ncompile[{extra}]'" in str(caught.value)


def test_a_digest_may_be_given_in_upper_case(tmp_path: Path, store: Store) -> None:
    digest = store.put(OTHER.encoded)
    assert open_plan(digest[:9].upper(), store.root).digest == digest
    pushed(Folder(tmp_path / "remote"))
    url = (tmp_path / "remote").as_uri()
    assert open_plan(PLAN.digest.upper(), tmp_path / "other", url).digest == PLAN.digest


# --- those who do not answer


def test_a_plan_by_a_url_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2NCOMPILE_REMOTE_TIMEOUT", "0.5")
    with silent_server() as url, pytest.raises(PlanError, match=r"no answer within 0\.5 s"):
        open_plan(f"{url}/a.plan.json")


def test_a_silent_remote_does_not_hold_up_a_build(
    compiled: list[str], call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("M2NCOMPILE_REMOTE_TIMEOUT", "0.5")
    with silent_server() as url:
        _, error = call("build", SPEC_FILE, "--remote", url)
        assert "warning: the remote store is not used: can't read the remote store" in error
        assert f"{url}/{action_path(KEY)}: no answer within 0.5 s" in error
    assert compiled == ["gpt2"]


def test_a_remote_that_drips_does_not_hold_up_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2NCOMPILE_REMOTE_TIMEOUT", "0.5")
    with (
        long_server(b" ", 1200, 0.05) as (url, _),
        pytest.raises(StoreError, match="less than 100000 bytes a second"),
    ):
        open_remote(url).lookup(KEY)


def test_time_is_given_for_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large plan over a slow line is no stuck call."""
    with (
        long_server(b" " * 40_000, 100, 0.1) as (url, _),
        pytest.raises(StoreError, match="more than 1048576 bytes"),
    ):
        with_digest(url, len, seconds=0.5).lookup(KEY)


@pytest.mark.parametrize("what", ["silent", "closed"])
def test_push_and_pull_end_by_one_message(what: str, filled: Store) -> None:
    with silent_server() as silent_url:
        endpoint = silent_url if what == "silent" else closed_port()
        env = CREDENTIALS | {"AWS_ENDPOINT_URL": endpoint, "M2NCOMPILE_REMOTE_TIMEOUT": "3"}
        for verb, args in (("read", ["push"]), ("list", ["pull"]), ("read", ["pull", "0" * 64])):
            found = run("cache", *args, "--remote", "s3://bucket/plans", code=2, **env)
            assert found.stdout == ""
            assert found.stderr.startswith(f"error: can't {verb} the remote store\n  s3://bucket/")
            assert found.stderr.count("\n") <= 3


def test_a_bucket_that_is_not_there_is_named(bucket: Bucket, filled: Store) -> None:
    error = run("cache", "push", "--remote", "s3://no-such-bucket/x", code=2).stderr
    assert "can't write the remote store\n  s3://no-such-bucket/x/objects/" in error
    assert "The specified bucket does not exist" in error


# --- as a user runs it


@pytest.mark.engine
def test_one_machine_builds_and_the_other_fetches(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = json.loads((ROOT / "plans/models/Qwen3-0.6B/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC.format(model="model"))
    args = ["build", spec, "--json", "--require-cache", "--push"]
    env = {"M2NCOMPILE_REMOTE": bucket.url}
    (first,) = json.loads(run(*args, "--cache", tmp_path / "a", **env).stdout)["plans"]
    assert (first["cached"], first["pushed"]) == (False, True)
    script = (
        "import sys; from m2ncompile.cli import app; "
        "app.app(sys.argv[1:], standalone_mode=False); "
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, *map(str, args), "--cache", str(tmp_path / "b")]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
    assert found.returncode == 0, found.stderr
    (second,) = json.loads(found.stdout)["plans"]
    assert (second["cached"], second["from_remote"], second["pushed"]) == (True, True, False)
    assert second["plan_digest"] == first["plan_digest"]
    assert files(tmp_path / "a") == files(tmp_path / "b") == bucket.files()
    assert len(bucket.writes()) == 2
