"""Commands about machines: what they have, and what a job would find on them."""
