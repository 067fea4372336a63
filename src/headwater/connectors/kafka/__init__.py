"""Kafka: a sink that produces in transactions."""
