"""Rare agreement: parallel pipelines that make their own updates and rarely agree on their weights (`Plan.agree`)."""
