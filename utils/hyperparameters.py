"""The flags of a run for TensorBoard's table of hyperparameters, as the messages of its plugin."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

PLUGIN = "hparams"
PREFIX = "_hparams_"
METRICS = ("reward/mean", "len/mean", "perf/env_steps_per_second")
"""The columns of results."""
DIFFERS = b"\x38\x01"
"""Of a column that comes first: field 7 of TensorBoard's HParamInfo is true. tensorboardX does not know the field."""


class Messages(NamedTuple):
    """The modules of tensorboardX that define them."""

    api: Any
    plugin: Any
    summary: Any


def table_of_runs(
    messages: Messages, flags: Mapping[str, object], first: Collection[str] = (), metrics: Sequence[str] = METRICS
) -> list[Any]:
    """The values of a summary that declare the columns of a run and fill in its flags.

    Args:
        messages: of the plugin.
        flags: value by name.
        first: names of the columns to come first: TensorBoard shows five of them until it is asked for others.
        metrics: tags of the columns of results.
    """
    started = messages.plugin.SessionStartInfo()
    columns = []
    for name, value in flags.items():
        kind, field, plain = _typed(value)
        setattr(started.hparams[name], field, plain)
        columns.append(messages.api.HParamInfo(name=name, type=messages.api.DataType.Value(kind)))
        if name in first:
            columns[-1].MergeFromString(DIFFERS)
    results = [messages.api.MetricInfo(name=messages.api.MetricName(tag=tag)) for tag in metrics]
    declared = messages.api.Experiment(hparam_infos=columns, metric_infos=results)
    contents = {
        "experiment": messages.plugin.HParamsPluginData(experiment=declared),
        "session_start_info": messages.plugin.HParamsPluginData(session_start_info=started),
    }
    return [_value(messages.summary, name, content) for name, content in contents.items()]


def _typed(value: object) -> tuple[str, str, object]:
    """TensorBoard's type of a flag, the field that holds such a value, and the value."""
    if isinstance(value, bool):
        return "DATA_TYPE_BOOL", "bool_value", value
    if isinstance(value, int | float):
        return "DATA_TYPE_FLOAT64", "number_value", float(value)
    return "DATA_TYPE_STRING", "string_value", value if isinstance(value, str) else json.dumps(value)


def _value(module: Any, name: str, content: Any) -> Any:
    plugin = module.SummaryMetadata.PluginData(plugin_name=PLUGIN, content=content.SerializeToString())
    metadata = module.SummaryMetadata(plugin_data=plugin)
    return module.Summary.Value(tag=f"{PREFIX}/{name}", metadata=metadata)
