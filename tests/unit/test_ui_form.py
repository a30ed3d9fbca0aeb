"""The form of a job: made from the schema, read back into the job."""

from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2 import Environment, FileSystemLoader

from phalanx import ui
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.ui import form
from phalanx.ui.field_labels import LABELS

SCHEMA = TrainingJob.model_json_schema()


def _leaves(made):
    return [leaf for one in made for leaf in (_leaves(one.fields) if one.kind == "group" else [one])]


def test_every_field_of_the_spec_is_asked_for():
    paths = {one.path for one in _leaves(form.fields(SCHEMA, {}, {}))}
    flat = form.filled_from(SCHEMA, TrainingJob(name="a", command="c", code={"git": "u"}).model_dump(mode="json"))
    assert {path for path in flat if path != "kind"} <= paths
    assert {
        "resources.nodes",
        "code.git",
        "datasets",
        "env",
        "retries.on",
        "kubernetes.image",
        "servers.count",
    } <= paths
    required = {one.path for one in _leaves(form.fields(SCHEMA, {}, {})) if one.required}
    assert required >= {"name", "command"}


def _all(made):
    return [path for one in made for path in [one.path, *_all(one.fields)]]


def test_every_field_is_explained():
    every = form.fields(SCHEMA, {}, {})
    assert {one.path for one in [*every, *_leaves(every)] if not one.help} == set()


def test_every_field_has_a_label_and_both_are_in_the_language_of_the_page():
    assert set(_all(form.fields(SCHEMA, {}, {}))) == set(LABELS)
    chinese = {leaf.path: leaf for leaf in _leaves(form.fields(SCHEMA, {}, {}, labels=LABELS, language="zh"))}
    assert (chinese["code.git"].label, chinese["env"].help) == ("仓库地址", "各进程的环境变量。")
    labelled = form.fields(SCHEMA, {}, {}, labels={"code.git": "Repository"}, options={"code.name": ["vision"]})
    leaves = {leaf.path: leaf for leaf in _leaves(labelled)}
    assert (leaves["code.git"].label, leaves["code.git"].name, leaves["code.name"].options) == (
        "Repository",
        "git",
        ("vision",),
    )


def test_kinds_follow_the_schema():
    kinds = {one.path: one.kind for one in _leaves(form.fields(SCHEMA, {}, {}))}
    assert kinds["backend"] == kinds["launch"] == "choice"
    assert kinds["resources.nodes"] == "text"  # a range as 1:4 too
    assert kinds["resources.gpu"] == kinds["resources.least_nodes"] == "number"
    assert kinds["datasets"] == "yaml"
    assert kinds["secrets"] == "lines"
    assert kinds["env"] == kinds["kubernetes.labels"] == "pairs"
    assert kinds["kubernetes.pod_patch"] == kinds["kubernetes.tolerations"] == "yaml"


def test_hidden_fields_are_left_out_and_errors_open_their_group():
    made = form.fields(SCHEMA, {}, {"resources.nodes": "too many"}, frozenset({"workspace"}))
    assert "workspace" not in {one.path for one in made}
    groups = {one.path: one for one in made if one.kind == "group"}
    assert groups["resources"].open
    assert not groups["kubernetes"].open


def test_what_cannot_be_read_is_said_at_its_field():
    job, errors = form.collect(SCHEMA, {"name": "a", "env": "LR", "datasets": "{"})
    assert job == {"name": "a"}
    assert "NAME=value" in errors["env"]
    assert "no YAML" in errors["datasets"]


@settings(max_examples=30)
@given(
    nodes=st.integers(1, 99),
    env=st.dictionaries(
        st.from_regex(r"[A-Z]{1,5}", fullmatch=True), st.from_regex(r"[a-z =.]{0,8}[a-z]", fullmatch=True)
    ),
    secrets=st.lists(st.from_regex(r"S_[A-Z]{1,5}", fullmatch=True), max_size=3),
    backend=st.sampled_from(["local", "slurm", "kubernetes"]),
    readonly=st.booleans(),
)
def test_a_job_comes_back_from_its_form(nodes, env, secrets, backend, readonly):
    job = TrainingJob(
        name="a",
        command="python t.py --x 'a b'",
        resources={"nodes": nodes},
        env=env,
        secrets=secrets,
        backend=backend,
        datasets=[{"name": "d", "mount": "data", "readonly": readonly}],
    )
    filled = form.filled_from(SCHEMA, job.model_dump(mode="json"))
    again, errors = form.collect(SCHEMA, filled)
    assert not errors
    assert TrainingJob.model_validate(again) == job


@given(st.text(alphabet=["\n", "\r", "\f", "\u2028", "\\", "n", '"', "=", " "], max_size=8))
@example('"\\n"')
@example('"\\"\\\\n\\""')
def test_a_variable_of_any_value_comes_back_from_the_form(value):
    job = TrainingJob(name="a", command="c", code={"git": "u"}, env={"A": value, "B": "b"})
    again, errors = form.collect(SCHEMA, form.filled_from(SCHEMA, job.model_dump(mode="json")))
    assert (again["env"], errors) == (job.env, {})


def test_every_kind_of_field_with_an_error_is_marked_invalid():
    names = ("name", "backend", "env", "datasets", "slurm.options")
    made = _leaves(form.fields(SCHEMA, {}, dict.fromkeys(names, "is wrong")))
    assert {one.kind for one in made if one.error} >= {"text", "choice", "pairs", "yaml"}
    folder = Path(ui.__file__).parent / "templates"
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True)
    environment.globals["prose"] = str
    field = environment.get_template("macros.html").module.field
    for one in made:
        assert ('aria-invalid="true"' in field(one, lambda *_, **__: "")) == bool(one.error), one.path
