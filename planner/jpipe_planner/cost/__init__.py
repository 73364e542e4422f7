"""What a plan costs: closed forms, memory, links, simulation, and bounds."""
