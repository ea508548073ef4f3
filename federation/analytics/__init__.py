"""Server-registry analytics: a Spark batch over the registry, health events and delivery attempts.

Importing this package imports no pyspark; its modules do (extra `analytics`).
"""
