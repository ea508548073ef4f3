"""The database of a node that runs the original Node implementation, as its own migrations leave it."""

from __future__ import annotations

from sqlalchemy import Engine

_SCHEMA = """
CREATE TABLE "user" (
    "id" text PRIMARY KEY NOT NULL,
    "name" text NOT NULL,
    "is_private" boolean DEFAULT false,
    "post_propagation_policy" text DEFAULT 'all'
);
CREATE TABLE "server_registry" (
    "id" text PRIMARY KEY NOT NULL,
    "url" text NOT NULL,
    "public_key" text NOT NULL,
    "encryption_public_key" text NOT NULL,
    "last_seen" timestamp NOT NULL,
    "created_at" timestamp NOT NULL,
    "updated_at" timestamp NOT NULL,
    "is_healthy" boolean NOT NULL,
    "health_check_attempts" integer DEFAULT 0 NOT NULL,
    "unhealthy_reason" text,
    CONSTRAINT "server_registry_url_unique" UNIQUE("url"),
    CONSTRAINT "server_registry_public_key_unique" UNIQUE("public_key"),
    CONSTRAINT "server_registry_encryption_public_key_unique" UNIQUE("encryption_public_key")
);
CREATE TABLE "delivery_jobs" (
    "id" text PRIMARY KEY NOT NULL,
    "target_url" text NOT NULL,
    "payload" text NOT NULL,
    "attempts" integer DEFAULT 0 NOT NULL,
    "last_attempted_at" timestamp,
    "next_attempt_at" timestamp,
    "created_at" timestamp NOT NULL
);
CREATE TABLE "blacklisted_servers" (
    "id" text PRIMARY KEY NOT NULL,
    "server_url" text NOT NULL,
    "created_at" timestamp NOT NULL,
    "reason" text NOT NULL
);
CREATE TABLE "rotate_challenge_tokens" (
    "id" text PRIMARY KEY NOT NULL,
    "signing_old_token" text NOT NULL,
    "signing_new_token" text NOT NULL,
    "encryption_old_token" text NOT NULL,
    "encryption_new_token" text NOT NULL,
    "new_signing_public_key" text NOT NULL,
    "new_encryption_public_key" text NOT NULL,
    "server_url" text NOT NULL,
    "created_at" timestamp NOT NULL,
    "attempts_left" integer DEFAULT 3 NOT NULL,
    "expires_at" timestamp NOT NULL
);
CREATE TABLE "follows" (
    "id" text PRIMARY KEY NOT NULL,
    "follower_id" text NOT NULL,
    "following_id" text NOT NULL,
    "accepted" boolean DEFAULT false NOT NULL,
    "created_at" timestamp NOT NULL,
    "follower_server_url" text,
    "following_server_url" text,
    "acknowledged" boolean DEFAULT false NOT NULL,
    "requester_signature" text,
    "responder_signature" text
);
ALTER TABLE "follows" ADD CONSTRAINT "follows_follower_server_url_server_registry_url_fk"
    FOREIGN KEY ("follower_server_url") REFERENCES "public"."server_registry"("url") ON DELETE cascade;
ALTER TABLE "follows" ADD CONSTRAINT "follows_following_server_url_server_registry_url_fk"
    FOREIGN KEY ("following_server_url") REFERENCES "public"."server_registry"("url") ON DELETE cascade;
CREATE UNIQUE INDEX "serverRegistry_publicKey_uidx" ON "server_registry" USING btree ("public_key");
CREATE UNIQUE INDEX "serverRegistry_encryptionPublicKey_uidx" ON "server_registry" ("encryption_public_key");
CREATE INDEX "serverRegistry_lastSeen_idx" ON "server_registry" USING btree ("last_seen");
CREATE INDEX "blacklistedServers_serverUrl_idx" ON "blacklisted_servers" USING btree ("server_url");
CREATE INDEX "rotateChallengeTokens_serverUrl_idx" ON "rotate_challenge_tokens" USING btree ("server_url");
CREATE INDEX "follows_followerServerUrl_idx" ON "follows" USING btree ("follower_server_url");
CREATE INDEX "follows_followingServerUrl_idx" ON "follows" USING btree ("following_server_url");
"""

_ROWS = """
INSERT INTO "user" VALUES ('u-1', 'Alice', false, 'all');
INSERT INTO "server_registry" VALUES ('s-1', 'https://b.example', 'key', 'encryption-key',
    '2025-03-30 02:30:00.123', '2025-01-01', '2025-01-02', false, 2, 'TIMEOUT');
INSERT INTO "delivery_jobs" VALUES ('d-1', 'https://b.example/api/auth/social/posts', '{"method":"FEDERATE_POST"}',
    1, '2025-03-30 02:30:00', NULL, '2025-03-30 02:29:59');
INSERT INTO "blacklisted_servers" VALUES ('x-1', 'https://evil.example', '2025-01-01', 'spam');
INSERT INTO "rotate_challenge_tokens" VALUES ('r-1', 'a', 'b', 'c', 'd', 'e', 'f', 'https://b.example', '2025-01-01', 3,
    '2025-01-02');
INSERT INTO "follows" VALUES ('f-1', 'u-1', 'remote', true, '2025-01-01', 'https://b.example', NULL, true, 'signature');
"""

TABLES = (
    "user",
    "server_registry",
    "delivery_jobs",
    "blacklisted_servers",
    "rotate_challenge_tokens",
    "follows",
)


def create_original(engine: Engine) -> None:
    """Its tables exist, each with one row."""
    with engine.begin() as connection:
        connection.exec_driver_sql(_SCHEMA)

        connection.exec_driver_sql(_ROWS)
