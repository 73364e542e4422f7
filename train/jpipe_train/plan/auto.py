"""`jpipe train --plan auto`: process 0 searches for a plan when the run starts, for the existing devices."""

import jax

import jpipe
from jpipe_planner import local_topology
from jpipe_planner.ranking import table
from jpipe_train.config.config import Config
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.launch.team import Team
from jpipe_train.plan.compiling import confirm, of_this_machine
from jpipe_train.plan.inputs import Request
from jpipe_train.plan.profiling import Parts, cores_of, profile_together
from jpipe_train.plan.search import search


def find_plan(config: Config, reporter: Reporter, team: Team) -> jpipe.Plan:
    """Profile, measure the links, search, and compile. All processes call this and get the same plan. Raise InputError if none fits."""
    parts = team.run_on_all(lambda: Parts.of(config, reporter))
    batch = config.train.batch_size
    profile = profile_together(parts, batch, jax.device_count(), reporter, team)
    topology = local_topology(cores=cores_of(parts, profile, jax.device_count(), team))
    request = parts.complete(Request(), team)

    def search_and_confirm() -> str:
        plans = search(profile, topology, batch, request, parts.config.uses_global_norm, reporter)
        choice = confirm(plans, parts, of_this_machine(), lambda attempt: reporter.say(table.attempt(attempt))).choice
        candidate = choice.ranked[0].candidate
        reporter.say(
            f"plan: {table.name(candidate)}, {count(candidate.microbatches, 'microbatch', 'es')} of {table.rows_of(candidate.rows)}, "
            + (f"mean delay {table.delay(candidate)}, " if candidate.delay else "")
            + f"expected {table.rate(choice.ranked[0].samples_per_second)} samples/s; the best of {choice.considered:,} candidates"
        )
        return choice.plan(choice.ranked[0]).to_json()

    return jpipe.Plan.from_json(team.from_first("the plan of process 0", search_and_confirm))
