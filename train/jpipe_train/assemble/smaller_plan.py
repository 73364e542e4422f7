"""Find a smaller plan for a run with fewer processes than its config is made for."""

import jpipe
from jpipe_train.config.config import AUTO, MOST_MICROBATCHES, Config, PlanConfig


def for_processes(config: Config, processes: int, planned: int | None) -> tuple[Config, str]:
    """Return the config with a plan for the available number of processes, and a line about the changes; "" without any.

    With n of N processes the plan has n / N of the config's ranks. First `smaller` is tried, then a search for a plan (`plan.file: auto`).
    A config with a plan file, or with lists of values for stages, always needs the search. The batch size does not change. If no number is
    `planned`, the config is returned unchanged. Raise jpipe.InputError if there are more processes than planned, or if the run could not
    continue with some smaller number of processes.
    """
    if planned is None:
        return config, ""
    if not processes <= planned:
        raise jpipe.InputError(where="--elastic", expected=f"at least as many as there are processes, {processes}", found=planned)
    if config.checkpoint.every is None:
        raise jpipe.InputError(
            "checkpoint.every: expected a number of steps with --elastic, found null; a lost process would lose all work; "
            "set it, such as checkpoint.every=10"
        )
    if config.optimizer.per_stage:
        raise jpipe.InputError(
            "optimizer.per_stage: cannot be used with --elastic, because its values are for a fixed number of stages; remove one of them"
        )
    _check_links(config, planned)
    if processes == planned or config.plan.file == AUTO:
        return config, ""
    ranks = config.plan.ranks * processes // planned
    plan = smaller(config.plan, ranks, config.train.batch_size)
    where = f"plan for {processes} of {planned} processes"
    if plan is None:
        reason = "a plan file" if config.plan.file is not None else f"no smaller {config.plan.schedule} plan with even stages and replicas"
        searched = config.plan.model_copy(update={"file": AUTO})
        return config.model_copy(update={"plan": searched}), f"{where}: the plan is searched for, because the config has {reason} for them"
    values = [
        f"{name} {getattr(plan, name)} instead of {getattr(config.plan, name)}"
        for name in ("num_stages", "replicas", "microbatches")
        if getattr(plan, name) != getattr(config.plan, name)
    ]
    return config.model_copy(update={"plan": plan}), f"{where}: {', '.join(values)}"


def _check_links(config: Config, planned: int) -> None:
    """Reject bottlenecks without places and, if a search could become necessary, compressed sums, which the planner cannot predict.

    Raise jpipe.InputError if for some number of processes there is no smaller plan.
    """
    if config.plan.links is None or config.plan.file is not None:
        return
    if (bottleneck := config.plan.links.bottleneck) is not None and bottleneck.after is None:
        raise jpipe.InputError(
            where="plan.links.bottleneck.after",
            expected="with --elastic, the layers before the bottlenecks, because a smaller plan cuts elsewhere",
            found="null",
            change="name them, such as the last layer of each stage",
        )
    if config.plan.links.sums is None:
        return
    for processes in range(planned - 1, 0, -1):
        if smaller(config.plan, config.plan.ranks * processes // planned, config.train.batch_size) is None:
            raise jpipe.InputError(
                "plan.links.sums: with --elastic, expected a plan that becomes smaller with each lost process, found no plan with "
                f"even stages and replicas for {processes} of {planned} processes, and a search cannot predict the cost of links.sums; "
                "leave out --elastic or links.sums"
            )


def smaller(plan: PlanConfig, ranks: int, batch_size: int) -> PlanConfig | None:
    """Return a plan with at most the stages and replicas of `plan` that uses exactly `ranks` ranks, or None if there is none.

    Of the possible plans, the plan with the most stages is chosen, because its stages need the least memory. It has the same number of
    microbatches, or the next larger number that divides the rows of a batch and is legal for the schedule and the replicas. With a plan
    file or a list of values for stages, the result is None.
    """
    if plan.file is not None or not isinstance(plan.replicas, int) or isinstance(plan.recompute, list) or isinstance(plan.mesh, list):
        return None
    for stages in range(plan.num_stages, 0, -plan.stages_per_rank):
        pipeline = max(stages // plan.stages_per_rank, 1)
        if ranks % pipeline or ranks // pipeline > plan.replicas:
            continue
        for microbatches in range(plan.microbatches, min(batch_size, MOST_MICROBATCHES) + 1):
            changes = {"num_stages": stages, "replicas": ranks // pipeline, "microbatches": microbatches}
            candidate = plan.model_copy(update=changes)
            if batch_size % microbatches == 0 and _is_legal(candidate):
                return candidate
    return None


def _is_legal(plan: PlanConfig) -> bool:
    try:
        jpipe.Plan.even([str(layer) for layer in range(plan.num_stages)], **plan.of_even_stages)
    except jpipe.InputError:
        return False
    return True
