"""`jpipe train --plan auto`: the plan is found when the run starts, by process 0, for the devices that there are."""

import os

import jax
from jpipe_planner import Profile, local_topology
from jpipe_planner.ranking import table

import jpipe
from jpipe_train.config.config import Config
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.launch.together import Together
from jpipe_train.plan.planning import Parts, Request, confirm, profile_of, search


def find_plan(config: Config, reporter: Reporter, together: Together) -> jpipe.Plan:
    """Profile on this device, measure the links, search and compile; the same plan in all processes, which all call this.

    Args:
        config: of the run; its batch size is that of the plan.
        reporter: prints what was found.
        together: the processes.

    Raises:
        jpipe.InputError: no plan fits.
    """
    parts = together.run_on_all(lambda: Parts.of(config, reporter))
    batch = config.train.batch_size

    def measured() -> Profile | None:
        # At the same time on all cores, for those that are busy slow each other down, as they will in training; and not more on one.
        if together.index >= (os.cpu_count() or 1):
            return None
        with together.working("the profile of the layers"):
            return profile_of(parts, None, batch, jax.device_count(), reporter)

    own = together.run_on_all(measured)
    profile = Profile.from_json(together.from_first("the profile of process 0", lambda: "" if own is None else own.to_json()))
    topology = local_topology(dispatch=profile.dispatch)

    request = Request(all_devices=together.processes is not None, replicas=not config.model.carries)

    def best() -> str:
        found = search(profile, topology, batch, request, parts.config.uses_global_norm, reporter)
        found, confirmed = confirm(found, parts, lambda attempt: reporter.say(table.attempt(attempt)))
        candidate = confirmed.ranked.candidate
        reporter.say(
            f"plan: {table.name(candidate)}, {count(candidate.microbatches, 'microbatch', 'es')} of {table.rows_of(candidate.rows)}, "
            f"expected {table.rate(confirmed.ranked.samples_per_second)} samples/s; the best of {found.choice.considered:,} candidates"
        )
        return found.choice.plan(confirmed.ranked).to_json()

    return jpipe.Plan.from_json(together.from_first("the plan of process 0", best))
