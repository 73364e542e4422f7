"""The plan of a run that has fewer processes than its config is made for."""

import jpipe
from jpipe_train.config.config import AUTO, MOST_MICROBATCHES, Config, PlanConfig


def for_processes(config: Config, processes: int, planned: int | None) -> tuple[Config, str]:
    """Return the config with a plan for the processes that are there.

    The ranks shrink with the processes: n of N processes have n / N of the config's ranks. `smaller` is tried first, then the planner
    (`plan.file: auto`), which also serves plan files and plans with values by stage. The size of the batch does not change.

    Args:
        config: the config of the run; its plan is for `planned` processes.
        processes: the number of processes that are there.
        planned: the number of processes that the config is made for; None to leave the config as it is.

    Returns:
        The config, and a line that says what is different; "" if nothing is.

    Raises:
        jpipe.InputError: there are more processes than planned, or the run cannot continue with any smaller number of them.
    """
    if planned is None:
        return config, ""
    if not processes <= planned:
        raise jpipe.InputError(where="--elastic", expected=f"at least as many as there are processes, {processes}", found=planned)
    if config.checkpoint.every is None:
        raise jpipe.InputError(
            "checkpoint.every: expected a number of steps with --elastic, found null: without checkpoints nothing is left when a process "
            "is lost; set it, such as checkpoint.every=10"
        )
    if config.optimizer.per_stage:
        raise jpipe.InputError(
            "optimizer.per_stage: cannot be used with --elastic, because its values are for a fixed number of stages; leave out one of them"
        )
    _check_links(config, planned)
    if processes == planned or config.plan.file == AUTO:
        return config, ""
    ranks = config.plan.ranks * processes // planned
    plan = smaller(config.plan, ranks, config.train.batch_size)
    where = f"plan for {processes} of {planned} processes"
    if plan is None:
        reason = "a plan file" if config.plan.file is not None else f"no {config.plan.schedule} plan of fewer even stages or replicas"
        searched = config.plan.model_copy(update={"file": AUTO})
        return config.model_copy(update={"plan": searched}), f"{where}: searched for, because the config has {reason} for them"
    values = [
        f"{name} {getattr(plan, name)} instead of {getattr(config.plan, name)}"
        for name in ("num_stages", "replicas", "microbatches")
        if getattr(plan, name) != getattr(config.plan, name)
    ]
    return config.model_copy(update={"plan": plan}), f"{where}: {', '.join(values)}"


def _check_links(config: Config, planned: int) -> None:
    """Reject a config that compresses sums if it would need a plan search later: the planner cannot price compression.

    Raises:
        jpipe.InputError: there is no smaller plan for some number of processes.
    """
    if config.plan.links is None or config.plan.links.sums is None or config.plan.file is not None:
        return
    for processes in range(planned - 1, 0, -1):
        if smaller(config.plan, config.plan.ranks * processes // planned, config.train.batch_size) is None:
            raise jpipe.InputError(
                "plan.links.sums: expected a plan with --elastic that has a smaller one for each number of processes, found none of fewer "
                f"even stages or replicas for {processes} of {planned}, and no search of plans prices it; leave out one of them"
            )


def smaller(plan: PlanConfig, ranks: int, batch_size: int) -> PlanConfig | None:
    """Return the plan with fewer stages or replicas that occupies exactly `ranks` ranks, or None.

    It has no more of either than `plan` has. Of the plans that fit, the one with the most stages is chosen: its stages need the least
    memory. It keeps the number of microbatches, or takes the next larger one that divides the batch and that schedule and replicas allow.

    Args:
        plan: the plan, with the keys of even stages; a plan file, or a value by stage, gives None.
        ranks: the number of ranks.
        batch_size: rows of a batch.
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
