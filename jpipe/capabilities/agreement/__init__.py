"""Rare agreement: parallel pipelines that make their own updates and agree on their weights rarely (`Plan.agree`)."""
