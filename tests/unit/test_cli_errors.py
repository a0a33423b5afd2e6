"""The command line as a user meets it: `train_appo.py` and `enjoy_appo.py` as processes."""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

from appo.algorithms.cli import COMMANDS, parse, run_command
from appo.algorithms.cli import run as cli_run
from appo.utils import logging
from appo.utils.command_line import say
from appo.utils.errors import ResourceError, UsageError
from appo.utils.flags import flags_of
from appo.utils.values import printable
from tests.patience import HANG_SECONDS

Train = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path: Path, script: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *argv]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def assert_one_line(result: "subprocess.CompletedProcess[str]", expected: str, folder: Path) -> None:
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--env=CartPole-v1", "--batch_size=100"], "--batch_size=100 is not a multiple of --rollout=32"),
        ([], "--env is required"),
    ],
)
def test_a_process_with_a_wrong_command_line_ends_with_one_line_and_exit_2(
    tmp_path: Path, argv: list[str], expected: str
) -> None:
    assert_one_line(run(tmp_path, "train_appo.py", *argv), expected, tmp_path)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--env=CartPole-v1", "--rolout=3"], "did you mean --rollout?"),
        (["--env=CartPole-v1", "--rnn_type=gnu"], "did you mean gru?"),
        (["--env=CartPole-v1", "--experiment=a/../../b"], "--experiment=a/../../b"),
        (["--env=CartPole-v1", "--num_envs_per_worker=-1"], "--num_envs_per_worker must be at least 0"),
        (["--env=CartPole-v1", "--batch_size=0"], "--batch_size must be at least 1"),
        (["--env=CartPole-v1", "--learning_rate=fast"], "--learning_rate must be a finite number, got fast"),
        (["--env=CartPole-v1", "--seed"], "--seed"),
        (["--env=CartPole-v1", "--config=missing.json"], "cannot read missing.json"),
        (["--env=CartPole-v1", "--with_pbt"], "needs at least 2 policies"),
        (["--env=CartPole-v1", "--experiment=x\ny"], "--experiment="),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(
    tmp_path: Path, train_here: Train, argv: list[str], expected: str
) -> None:
    assert_one_line(train_here(*argv), expected, tmp_path)


def test_any_failure_is_one_line_above_the_lines_of_the_users_code(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise KeyError("obs.desired_gaol")

    assert run_command(fails) == 1
    line, *trace = capfd.readouterr().err.splitlines()
    assert line == "error: KeyError: 'obs.desired_gaol'"
    assert trace[0] == "Traceback (most recent call last):"
    assert [Path(one.split('"')[1]) for one in trace if "File" in one] == [Path(__file__)]


def test_a_damaged_saved_configuration_is_one_line_and_exit_2(tmp_path: Path, train_here: Train) -> None:
    path = tmp_path / "train_dir" / "a" / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"env": "CartPole-v1", ')
    result = train_here("--experiment=a")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: train_dir/a/config.json is damaged: ")


def test_the_same_holds_for_enjoy_and_the_console_script(tmp_path: Path) -> None:
    result = run(tmp_path, "enjoy_appo.py", "--determinstic")
    assert (result.returncode, result.stderr) == (
        2,
        "error: unknown flag --determinstic; did you mean --deterministic?\n",
    )
    main = "import sys; from appo.algorithms.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", main, "trian"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert (result.returncode, result.stderr) == (
        2,
        f"error: unknown command trian; did you mean train? ({', '.join(COMMANDS)})\n",
    )


HELP = """
import runpy, sys
sys.argv = [{script!r}, "--help", *{argv!r}]
try:
    runpy.run_path({script!r}, run_name="__main__")
except SystemExit as end:
    assert end.code == 0, end.code
assert not {{"torch", "numpy", "gymnasium"}} & set(sys.modules), "too much imported for help"
"""


@pytest.mark.parametrize(
    ("script", "argv"), [("train_appo.py", ["--env=CartPole-v1", "--wrong"]), ("enjoy_appo.py", [])]
)
def test_help_works_with_anything_and_imports_nothing_heavy(tmp_path: Path, script: str, argv: list[str]) -> None:
    code = HELP.format(script=str(ROOT / script), argv=argv)
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert "--env TEXT" in result.stdout
    if script == "train_appo.py":
        assert "default: 64,64 by preset" in " ".join(result.stdout.split())


HELPS = """
import contextlib, io, json, sys
from appo.algorithms.cli import run
heavy, found = set(), {}
for name in sys.argv[1:]:
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(name, ["--help"])
        except SystemExit as end:
            code = end.code
    more = {"torch", "numpy", "gymnasium", "matplotlib"} & set(sys.modules) - heavy
    heavy |= more
    found[name] = {"code": code, "heavy": sorted(more), "out": out.getvalue(), "err": err.getvalue()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, dict[str, object]]:
    """What `--help` of every command gives, one after the other in one process; its heavy imports are the first's."""
    command = [sys.executable, "-c", HELPS, *COMMANDS]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    found: dict[str, dict[str, object]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_imports_nothing_heavy(name: str, helps: dict[str, dict[str, object]]) -> None:
    found = helps[name]
    assert found["heavy"] == [], "too much imported for help"
    assert (found["code"], found["err"]) == (0, "")
    assert str(found["out"]).startswith("usage: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_row_of_the_table_names_is_there(name: str) -> None:
    row = COMMANDS[name]
    assert callable(resolve_name(row.run))
    assert not row.check or callable(resolve_name(row.check))
    flags = flags_of(resolve_name(row.config)) if row.config else {}
    assert {*row.words, *row.implied, *(other for other, _ in row.implied.values())} <= flags.keys()
    assert {flag.removeprefix("--") for flag in row.short.values()} <= flags.keys()
    assert not row.needs or row.words


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["a,b", "c", "--runs", "d"], ("a,b", "c", "d")),
        (["--runs=a,b"], ("a", "b")),
    ],
)
def test_words_without_a_name_are_runs_as_they_are(words: list[str], given: tuple[str, ...]) -> None:
    assert parse("compare", words)[0].runs == given


def test_version_and_help_into_a_closed_pipe(tmp_path: Path) -> None:
    assert run(tmp_path, "train_appo.py", "--version").stdout.startswith("appo ")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "train_appo.py"), "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=HANG_SECONDS, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_the_encoding_of_stdout_does_not_know_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    say("\u2588 \u00e4 \udc80")
    assert written.getvalue() == b"? \xe4 \\udc80\n"


ESCAPES = "\x1b[2J\x1b]0;PWN\x07 \u202egnp.exe \u009b31m \x7f\r\t\u2028"


@pytest.mark.parametrize("text", ["", "plain", "two\nlines", "\u00e4\u2588", "\\x1b", ESCAPES, "a\x1b\nb", "\udc80"])
def test_what_cannot_be_printed_is_spelled_and_only_once(text: str) -> None:
    escaped = printable(text)
    assert printable(escaped) == escaped
    assert all(c == "\n" or c.isprintable() for c in escaped)
    assert escaped.count("\n") == text.count("\n")
    assert (escaped == text) == all(c == "\n" or c.isprintable() for c in text)


def test_errors_tracebacks_and_lines_command_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise UsageError(f"no environment {ESCAPES}")

    def fail_with_a_cause() -> int:
        try:
            raise ValueError(ESCAPES)
        except ValueError as error:
            raise ResourceError(ESCAPES) from error

    say(f"name {ESCAPES}")
    assert (run_command(fail), run_command(fail_with_a_cause)) == (2, 5)
    out, err = capsys.readouterr()
    assert all(c == "\n" or c.isprintable() for c in out + err)
    assert out.startswith("name \\x1b[2J\\x1b]0;PWN\\x07 \\u202egnp.exe \\x9b31m")
    assert "error: no environment \\x1b[2J" in err
    assert "ValueError: \\x1b[2J" in err


def test_log_lines_command_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logging.configure("main", None)
    try:
        logging.logging.getLogger("x").info("resuming %s", ESCAPES)
        logging.logging.getLogger("x").warning("damaged %s", ESCAPES)
    finally:
        logging.logging.getLogger().handlers.clear()
    out, err = capsys.readouterr()
    assert all(c == "\n" or c.isprintable() for c in out + err)
    assert (out.count("\n"), err.count("\n")) == (1, 1)


HOSTILE_NAMES = {
    "env": {"env": f"CartPole{ESCAPES}"},
    "flag": {"env": "CartPole-v1", f"gam{ESCAPES}ma": 1},
    "value": {"env": "CartPole-v1", "rnn_type": f"gru{ESCAPES}", "save_best_metric": ESCAPES},
    "algorithm": {"env": "CartPole-v1", "algo": f"APPO{ESCAPES}"},
}


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_in_a_strangers_run_command_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for run_name in ("a", "b"):
        (tmp_path / "train_dir" / run_name).mkdir(parents=True)
        (tmp_path / "train_dir" / run_name / "metrics.jsonl").write_text("")
    (tmp_path / "train_dir" / "a" / "config.json").write_text(json.dumps(HOSTILE_NAMES[name]))
    (tmp_path / "train_dir" / "b" / "config.json").write_text('{"env": "CartPole-v1"}')
    status = {"state": f"failed{ESCAPES}", "reason": ESCAPES, "warnings": [ESCAPES], "policies": [{ESCAPES: 1}]}
    (tmp_path / "train_dir" / "a" / "status.json").write_text(json.dumps(status))
    for words in (
        ["runs"], ["top", "a", "--once"], ["compare", "a", "b"], ["plot", "a", "-o", "x.png"],
        ["report", "a"], ["report", "a", "b"], ["plot", "a", "--lineage"],
        ["enjoy", "--experiment=a"], ["evaluate", "a"], ["match", "a", "b"], ["export", "a"],
        ["hub", "a", "--dry_run"], ["train", "--experiment=a"],
    ):  # fmt: skip
        assert run_command(lambda words=words: cli_run(words[0], words[1:])) in (0, 2, 6), words  # type: ignore[misc]
        out, err = capsys.readouterr()
        assert all(c == "\n" or c.isprintable() for c in out + err), words
        assert "Traceback" not in err


LACKING: list[tuple[BaseException, str]] = [
    (MemoryError(), "too little free memory"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 160000000000 bytes"), "160000000000"),
    (RuntimeError("can't start new thread"), "no more threads may be started"),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "no more processes may be started"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "too little free memory"),
    (OSError(errno.EMFILE, "Too many open files"), "raise `ulimit -n`"),
]


@pytest.mark.parametrize(("error", "expected"), LACKING, ids=[type(error).__name__ for error, _ in LACKING])
def test_what_the_system_lacks_is_one_line_and_exit_5(
    capsys: pytest.CaptureFixture[str], error: BaseException, expected: str
) -> None:
    def fail() -> int:
        raise error

    assert run_command(fail) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert expected in line


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_descriptors_that_the_caller_has_closed_lead_nowhere(tmp_path: Path, closed: str) -> None:
    command = f'exec "$@" {closed}'
    words = [sys.executable, str(ROOT / "train_appo.py"), "--env=CartPole-v1", "--print_config=json"]
    done = subprocess.run(
        ["sh", "-c", command, "sh", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (done.stdout == "") == ("1>" in closed)
    wrong = [*words, "--wrong=1"]
    done = subprocess.run(
        ["sh", "-c", command, "sh", *wrong], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (done.stderr == "") == ("2>" in closed)
    assert os.listdir(tmp_path) == []


def test_a_gpu_without_memory_in_main_is_one_line_and_exit_5(capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert run_command(train) == 5
    line, *trace = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the GPU has too little free memory: lower --microbatch_size or --batch_size")
    assert trace[-1] == "torch.OutOfMemoryError: CUDA out of memory."
    assert run_command(lambda: exec('raise RuntimeError("no memory")')) == 1


def test_what_every_process_imports_of_the_console_script_is_little() -> None:
    words = "import sys, algorithms.cli; print([m for m in ('importlib.metadata', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


MAIN = f"import sys; sys.path.append({str(ROOT / 'src')!r}); from appo.algorithms.cli import main; sys.exit(main())"


@pytest.mark.parametrize(
    "command", [["train", "--env=CartPole-v1"], ["enjoy", "--env=CartPole-v1"], ["runs"], ["doctor"]]
)
def test_a_current_folder_that_is_gone_is_one_line(tmp_path: Path, command: list[str]) -> None:
    words = [sys.executable, "-c", MAIN, *command]
    script = 'cd "$0" && rmdir "$0" && exec "$@"'
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["/bin/sh", "-c", script, str(gone), *words], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.stderr == (
        "error: the current folder is gone (No such file or directory): cd to another one and start again\n"
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_a_current_folder_in_which_nothing_can_be_opened_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appo.utils.command_line.os.access", lambda path, mode: False)  # nothing is closed to root
    with pytest.raises(UsageError, match=r"nothing in the current folder .* may be opened: cd to another one"):
        cli_run("runs", [])
    with pytest.raises(SystemExit):
        cli_run("runs", ["--help"])


def test_the_module_is_the_command() -> None:
    words = [sys.executable, "-m", "appo.algorithms.cli"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.stdout.startswith("usage: appo COMMAND [flags]\n  train ")
    wrong = subprocess.run(
        [*words, "trian"], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert (done.returncode, wrong.returncode) == (0, 2)
    assert wrong.stderr.startswith("error: unknown command trian; did you mean train?")


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("ascii", "saved zug/?? at 10 ?"),
        ("iso-8859-1", "saved zug/\xfc\xe4 at 10 ?"),
        ("utf-8", "saved zug/\xfc\xe4 at 10 \u20ac"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_log_lines_pass_any_encoding_of_the_output(
    monkeypatch: pytest.MonkeyPatch, encoding: str, said: str, as_json: bool
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    err = io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    root = logging.logging.getLogger()
    before = list(root.handlers), root.level
    root.handlers = []
    try:
        logging.configure("main", None, as_json=as_json)
        for write in (root.info, root.warning):
            write("saved %s at %d \u20ac", "zug/\xfc\xe4", 10)
        texts = [stream.buffer.getvalue().decode(encoding) for stream in (out, err)]  # type: ignore[attr-defined]
    finally:
        root.handlers, _ = before
        root.setLevel(before[1])
    if as_json:
        lines = [json.loads(line)["message"] for line in texts[0].splitlines()]
        assert lines == ["saved zug/\xfc\xe4 at 10 \u20ac"] * 2
        return
    assert texts[0] == f"{said}\n"
    spelled = "saved zug/\xfc\xe4 at 10 \u20ac".encode(encoding, "backslashreplace").decode(encoding)
    assert texts[1] == f"{spelled}\n"
