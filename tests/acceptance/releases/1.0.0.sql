BEGIN TRANSACTION;
CREATE TABLE accepted_keys (
	server_url TEXT NOT NULL, 
	fingerprint TEXT NOT NULL, 
	accepted_at DATETIME NOT NULL, 
	PRIMARY KEY (server_url, fingerprint)
);
CREATE TABLE activitypub_actors (
	id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	is_instance BOOLEAN NOT NULL, 
	removed_at DATETIME, 
	PRIMARY KEY (id)
);
CREATE TABLE activitypub_follows (
	local_actor TEXT NOT NULL, 
	remote_actor TEXT NOT NULL, 
	direction TEXT NOT NULL, 
	inbox TEXT NOT NULL, 
	shared_inbox TEXT, 
	follow_id TEXT, 
	state TEXT NOT NULL, 
	since DATETIME NOT NULL, 
	PRIMARY KEY (local_actor, remote_actor, direction)
);
CREATE TABLE activitypub_inboxes (
	url TEXT NOT NULL, 
	server_url TEXT NOT NULL, 
	gone_at DATETIME, 
	gone_code INTEGER, 
	missing_since DATETIME, 
	missing_last DATETIME, 
	is_shared BOOLEAN NOT NULL, 
	tried_at DATETIME, 
	PRIMARY KEY (url)
);
CREATE TABLE activitypub_keys (
	key_id TEXT NOT NULL, 
	actor_id TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	private TEXT NOT NULL, 
	public_pem TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	use_from DATETIME NOT NULL, 
	retired_at DATETIME, 
	PRIMARY KEY (key_id)
);
CREATE TABLE activitypub_received (
	number INTEGER NOT NULL, 
	activity_hash TEXT NOT NULL, 
	activity_id TEXT, 
	type TEXT NOT NULL, 
	actor TEXT NOT NULL, 
	received_at DATETIME NOT NULL, 
	state TEXT NOT NULL, 
	text TEXT NOT NULL, 
	attempts INTEGER NOT NULL, 
	last_error TEXT, 
	PRIMARY KEY (number)
);
CREATE TABLE activitypub_remote_keys (
	key_id TEXT NOT NULL, 
	owner TEXT, 
	public_pem TEXT, 
	fetched_at DATETIME, 
	refetched_at DATETIME, 
	failed_at DATETIME, 
	PRIMARY KEY (key_id)
);
CREATE TABLE admin_actions (
	id INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	actor TEXT NOT NULL, 
	source TEXT NOT NULL, 
	action TEXT NOT NULL, 
	arguments TEXT NOT NULL, 
	server_url TEXT, 
	affected BIGINT NOT NULL, 
	finished_at DATETIME, 
	error TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE attempt_minutes (
	minute DATETIME NOT NULL, 
	outcome TEXT NOT NULL, 
	attempts BIGINT NOT NULL, 
	latencies JSON NOT NULL, 
	PRIMARY KEY (minute, outcome)
);
CREATE TABLE blacklist_revision (
	id INTEGER NOT NULL, 
	revision BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "blacklist_revision" VALUES(1,0);
CREATE TABLE blacklisted_servers (
	id TEXT NOT NULL, 
	server_url TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	reason TEXT NOT NULL, expires_at DATETIME, 
	PRIMARY KEY (id)
);
CREATE TABLE bulk_jobs (
	id INTEGER NOT NULL, 
	created_at DATETIME NOT NULL, 
	verb TEXT NOT NULL, 
	chosen JSON NOT NULL, 
	total BIGINT, 
	token BIGINT NOT NULL, 
	leased_until DATETIME, 
	finished_at DATETIME, 
	result JSON, 
	error TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE database_identity (
	id TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "database_identity" VALUES('e58fe521-ba8d-4a10-99b4-c93be9b5bfb6');
CREATE TABLE delivery_attempts (
	id INTEGER NOT NULL, 
	delivery_id TEXT NOT NULL, 
	job_name TEXT NOT NULL, 
	method TEXT, 
	server_url TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	started_at DATETIME NOT NULL, 
	duration_ms INTEGER NOT NULL, 
	outcome TEXT NOT NULL, 
	error_code TEXT, 
	http_status INTEGER, 
	relayed_by TEXT, 
	request_bytes INTEGER, 
	response_bytes INTEGER, 
	series INTEGER, 
	remote_code TEXT, 
	note TEXT, 
	activity_id TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE delivery_jobs (
	id TEXT NOT NULL, 
	target_url TEXT NOT NULL, 
	payload TEXT NOT NULL, 
	attempts INTEGER DEFAULT 0 NOT NULL, 
	last_attempted_at DATETIME, 
	next_attempt_at DATETIME, 
	created_at DATETIME NOT NULL, job_name TEXT, server_url TEXT, wire TEXT DEFAULT 'sealed' NOT NULL, queued_at DATETIME, settled_at DATETIME, outcome TEXT, last_error TEXT, payload_id TEXT, error_code TEXT, state TEXT DEFAULT 'ready' NOT NULL, held_reason TEXT, held_at DATETIME, job_id TEXT, series INTEGER DEFAULT 0 NOT NULL, sending INTEGER, first_attempted_at DATETIME, released_at DATETIME, canary_at DATETIME, ordering_key TEXT, ordering_position BIGINT, holds INTEGER DEFAULT 0 NOT NULL, suspect INTEGER, alone INTEGER DEFAULT 0 NOT NULL, trace TEXT, 
	PRIMARY KEY (id)
);
INSERT INTO "delivery_jobs" VALUES('01a21f8c-7542-7758-a093-92c659b3c2bb','http://127.0.0.1:7/api/auth/social/posts','{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"queued-0","content":[{"type":"text","value":"hello"}],"authorId":"writer","published":"2026-11-28T00:27:08.482Z","isPrivate":false}}',0,NULL,NULL,'2026-11-28 00:27:08.493189','deliver-post','http://127.0.0.1:7','sealed','2026-11-28 00:27:08.493189',NULL,NULL,NULL,NULL,NULL,'ready',NULL,NULL,'01a21f8c-7542-7758-a093-92c659b3c2bb',0,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,0,NULL);
INSERT INTO "delivery_jobs" VALUES('01a21f8c-7607-7ec7-9048-db089e6f8d3a','http://127.0.0.1:7/api/auth/social/posts','{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"queued-1","content":[{"type":"text","value":"hello"}],"authorId":"writer","published":"2026-11-28T00:27:08.678Z","isPrivate":false}}',0,NULL,NULL,'2026-11-28 00:27:08.681509','deliver-post','http://127.0.0.1:7','sealed','2026-11-28 00:27:08.681509',NULL,NULL,NULL,NULL,NULL,'ready',NULL,NULL,'01a21f8c-7607-7ec7-9048-db089e6f8d3a',0,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,0,NULL);
INSERT INTO "delivery_jobs" VALUES('01a21f8c-760a-7730-8725-b0f2d12f2c08','http://127.0.0.1:7/api/auth/social/posts','{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"queued-2","content":[{"type":"text","value":"hello"}],"authorId":"writer","published":"2026-11-28T00:27:08.682Z","isPrivate":false}}',0,NULL,NULL,'2026-11-28 00:27:08.685326','deliver-post','http://127.0.0.1:7','sealed','2026-11-28 00:27:08.685326',NULL,NULL,NULL,NULL,NULL,'ready',NULL,NULL,'01a21f8c-760a-7730-8725-b0f2d12f2c08',0,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,0,NULL);
INSERT INTO "delivery_jobs" VALUES('01a21f8c-7692-7715-8e3a-d9ebccc6630f','http://127.0.0.1:7/api/auth/social/posts','{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"unqueued-0","content":[{"type":"text","value":"hello"}],"authorId":"writer","published":"2026-11-28T00:27:08.818Z","isPrivate":false}}',0,NULL,NULL,'2026-11-28 00:27:08.819351','deliver-post','http://127.0.0.1:7','sealed','2026-11-28 00:27:08.819351',NULL,NULL,NULL,NULL,NULL,'ready',NULL,NULL,'01a21f8c-7692-7715-8e3a-d9ebccc6630f',0,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,0,NULL);
INSERT INTO "delivery_jobs" VALUES('01a21f8c-7694-73e4-af5c-69c6282ef26b','http://127.0.0.1:7/api/auth/social/posts','{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"unqueued-1","content":[{"type":"text","value":"hello"}],"authorId":"writer","published":"2026-11-28T00:27:08.820Z","isPrivate":false}}',0,NULL,NULL,'2026-11-28 00:27:08.820526','deliver-post','http://127.0.0.1:7','sealed','2026-11-28 00:27:08.820526',NULL,NULL,NULL,NULL,NULL,'ready',NULL,NULL,'01a21f8c-7694-73e4-af5c-69c6282ef26b',0,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,0,NULL);
INSERT INTO "delivery_jobs" VALUES('01a21f8c-7695-7027-ac04-0f2d1ad52f11','http://127.0.0.1:7/api/auth/social/posts','{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"unqueued-2","content":[{"type":"text","value":"hello"}],"authorId":"writer","published":"2026-11-28T00:27:08.821Z","isPrivate":false}}',0,NULL,NULL,'2026-11-28 00:27:08.821368','deliver-post','http://127.0.0.1:7','sealed','2026-11-28 00:27:08.821368',NULL,NULL,NULL,NULL,NULL,'ready',NULL,NULL,'01a21f8c-7695-7027-ac04-0f2d1ad52f11',0,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,0,NULL);
INSERT INTO "delivery_jobs" VALUES('01a21f8c-76bd-7b7b-95ce-c9dd30a7517e','http://127.0.0.1:7/api/auth/social/posts','{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"held-0","content":[{"type":"text","value":"hello"}],"authorId":"writer","published":"2026-11-28T00:27:08.861Z","isPrivate":false}}',0,NULL,NULL,'2026-11-28 00:27:08.862052','deliver-post','http://127.0.0.1:7','sealed',NULL,NULL,NULL,NULL,NULL,NULL,'held','server','2026-11-28 00:27:08.862052','01a21f8c-76bd-7b7b-95ce-c9dd30a7517e',0,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,0,NULL);
INSERT INTO "delivery_jobs" VALUES('01a21f8c-76be-771f-b747-549d89fe6256','http://127.0.0.1:7/api/auth/social/posts','{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"held-1","content":[{"type":"text","value":"hello"}],"authorId":"writer","published":"2026-11-28T00:27:08.862Z","isPrivate":false}}',0,NULL,NULL,'2026-11-28 00:27:08.863169','deliver-post','http://127.0.0.1:7','sealed',NULL,NULL,NULL,NULL,NULL,NULL,'held','server','2026-11-28 00:27:08.863169','01a21f8c-76be-771f-b747-549d89fe6256',0,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,0,NULL);
INSERT INTO "delivery_jobs" VALUES('01a21f8c-76bf-7794-a35f-9f9113e967ef','http://127.0.0.1:7/api/auth/social/posts','{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"held-2","content":[{"type":"text","value":"hello"}],"authorId":"writer","published":"2026-11-28T00:27:08.863Z","isPrivate":false}}',0,NULL,NULL,'2026-11-28 00:27:08.863891','deliver-post','http://127.0.0.1:7','sealed',NULL,NULL,NULL,NULL,NULL,NULL,'held','server','2026-11-28 00:27:08.863891','01a21f8c-76bf-7794-a35f-9f9113e967ef',0,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,0,NULL);
CREATE TABLE delivery_losses (
	id TEXT NOT NULL, 
	server_url TEXT, 
	job_name TEXT, 
	state TEXT NOT NULL, 
	error_code TEXT, 
	created_at DATETIME NOT NULL, 
	lost_at DATETIME NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE delivery_payloads (
	id TEXT NOT NULL, 
	payload TEXT NOT NULL, 
	refs INTEGER NOT NULL, 
	created_at DATETIME NOT NULL, 
	activity_id TEXT, 
	actor TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE delivery_totals (
	state TEXT NOT NULL, 
	held_reason TEXT NOT NULL, 
	deliveries BIGINT NOT NULL, 
	counted_at DATETIME NOT NULL, 
	PRIMARY KEY (state, held_reason)
);
CREATE TABLE federation_alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT federation_alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "federation_alembic_version" VALUES('0100');
CREATE TABLE follow_news (
	id TEXT NOT NULL, 
	server_url TEXT NOT NULL, 
	follow_id TEXT NOT NULL, 
	told_at DATETIME NOT NULL, 
	noted_at DATETIME NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE follows (
	id TEXT NOT NULL, 
	follower_id TEXT NOT NULL, 
	following_id TEXT NOT NULL, 
	accepted BOOLEAN DEFAULT 0 NOT NULL, 
	created_at DATETIME NOT NULL, 
	follower_server_url TEXT, 
	following_server_url TEXT, 
	acknowledged BOOLEAN DEFAULT 0 NOT NULL, 
	requester_signature TEXT, 
	responder_signature TEXT, 
	PRIMARY KEY (id), 
	CONSTRAINT follows_follower_server_url_server_registry_url_fk FOREIGN KEY(follower_server_url) REFERENCES server_registry (url) ON DELETE CASCADE, 
	CONSTRAINT follows_following_server_url_server_registry_url_fk FOREIGN KEY(following_server_url) REFERENCES server_registry (url) ON DELETE CASCADE
);
CREATE TABLE process_clocks (
	process TEXT NOT NULL, 
	machine_at DATETIME NOT NULL, 
	database_at DATETIME NOT NULL, 
	PRIMARY KEY (process)
);
CREATE TABLE queue_sightings (
	kind TEXT NOT NULL, 
	what TEXT NOT NULL, 
	seen_at DATETIME NOT NULL, 
	PRIMARY KEY (kind, what)
);
CREATE TABLE relay_candidates (
	server_url TEXT NOT NULL, 
	rank INTEGER NOT NULL, 
	as_of DATE NOT NULL, 
	generation BIGINT NOT NULL, 
	score DOUBLE NOT NULL, 
	availability DOUBLE, 
	p95_ms INTEGER, 
	last_seen DATETIME, 
	PRIMARY KEY (server_url)
);
CREATE TABLE rollup_positions (
	name TEXT NOT NULL, 
	position BIGINT NOT NULL, 
	upto BIGINT, 
	horizon BIGINT, 
	PRIMARY KEY (name)
);
CREATE TABLE rotate_challenge_tokens (
	id TEXT NOT NULL, 
	signing_old_token TEXT NOT NULL, 
	signing_new_token TEXT NOT NULL, 
	encryption_old_token TEXT NOT NULL, 
	encryption_new_token TEXT NOT NULL, 
	new_signing_public_key TEXT NOT NULL, 
	new_encryption_public_key TEXT NOT NULL, 
	server_url TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	attempts_left INTEGER DEFAULT 3 NOT NULL, 
	expires_at DATETIME NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE scheduler_jobs (
	name TEXT NOT NULL, 
	token INTEGER NOT NULL, 
	holder TEXT, 
	leased_until DATETIME, 
	started_at DATETIME, 
	finished_at DATETIME, 
	outcome TEXT, 
	detail TEXT, 
	PRIMARY KEY (name)
);
CREATE TABLE server_health_events (
	id INTEGER NOT NULL, 
	server_url TEXT NOT NULL, 
	from_state TEXT NOT NULL, 
	to_state TEXT NOT NULL, 
	reason TEXT, 
	at DATETIME NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE server_links (
	server_url TEXT NOT NULL, 
	wire TEXT DEFAULT 'sealed' NOT NULL, 
	state TEXT NOT NULL, 
	since DATETIME NOT NULL, 
	reason TEXT, 
	operator_hold BOOLEAN NOT NULL, 
	relayed BOOLEAN NOT NULL, 
	acknowledged BOOLEAN NOT NULL, 
	evidence INTEGER NOT NULL, 
	evidence_at DATETIME, 
	last_success_at DATETIME, 
	rejections INTEGER NOT NULL, 
	probes INTEGER NOT NULL, 
	next_probe_at DATETIME, 
	rests INTEGER NOT NULL, 
	rest_until DATETIME, 
	release_start FLOAT NOT NULL, 
	release_rate FLOAT NOT NULL, 
	release_at DATETIME, 
	looked_at DATETIME, 
	profile TEXT, 
	fell_at DATETIME, 
	canaries INTEGER DEFAULT 0 NOT NULL, 
	probed_at DATETIME, 
	moved_to TEXT, 
	look_ended_at DATETIME, 
	signature TEXT, 
	first_answer_was_page BOOLEAN, 
	PRIMARY KEY (server_url, wire)
);
INSERT INTO "server_links" VALUES('http://127.0.0.1:7','sealed','up','2026-11-28 00:27:08.852115',NULL,1,0,0,0,NULL,NULL,0,0,NULL,0,NULL,1.0,1.0,NULL,NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE server_registry (
	id TEXT NOT NULL, 
	url TEXT NOT NULL, 
	public_key TEXT NOT NULL, 
	encryption_public_key TEXT NOT NULL, 
	last_seen DATETIME NOT NULL, 
	created_at DATETIME NOT NULL, 
	updated_at DATETIME NOT NULL, 
	is_healthy BOOLEAN NOT NULL, 
	health_check_attempts INTEGER DEFAULT 0 NOT NULL, 
	unhealthy_reason TEXT, knows_key TEXT, rotation_tried_at DATETIME, rotation_problem TEXT, proved_at DATETIME, claimed_by TEXT, claimed_at DATETIME, claim_proved BOOLEAN, 
	PRIMARY KEY (id), 
	CONSTRAINT server_registry_url_unique UNIQUE (url), 
	CONSTRAINT server_registry_public_key_unique UNIQUE (public_key), 
	CONSTRAINT server_registry_encryption_public_key_unique UNIQUE (encryption_public_key)
);
CREATE TABLE server_scorecards (
	server_url TEXT NOT NULL, 
	window_days INTEGER NOT NULL, 
	as_of DATE NOT NULL, 
	generation BIGINT NOT NULL, 
	attempts BIGINT NOT NULL, 
	delivered BIGINT NOT NULL, 
	availability DOUBLE, 
	score DOUBLE, 
	p95_ms INTEGER, 
	failures INTEGER, 
	mttf_s DOUBLE, 
	mttr_s DOUBLE, 
	longest_outage_s DOUBLE, 
	trend TEXT, 
	trend_change DOUBLE, 
	state TEXT, 
	state_since DATETIME, 
	top_error TEXT, 
	action TEXT NOT NULL, 
	reasons JSON NOT NULL, 
	owed BIGINT, 
	held BIGINT, 
	owed_since DATETIME, 
	lost BIGINT, 
	PRIMARY KEY (server_url, window_days)
);
CREATE TABLE server_summaries (
	server_url TEXT NOT NULL, 
	link TEXT NOT NULL, 
	link_since DATETIME, 
	advice TEXT NOT NULL, 
	score DOUBLE NOT NULL, 
	ready BIGINT NOT NULL, 
	held BIGINT NOT NULL, 
	owed BIGINT NOT NULL, 
	failed BIGINT NOT NULL, 
	expired BIGINT NOT NULL, 
	given_up BIGINT NOT NULL, 
	oldest_at DATETIME, 
	PRIMARY KEY (server_url)
);
CREATE TABLE sweeps (
	id INTEGER NOT NULL, 
	swept_at DATETIME NOT NULL, 
	spares_seconds FLOAT DEFAULT 0 NOT NULL, 
	queue_lost_at DATETIME, 
	PRIMARY KEY (id)
);
CREATE TABLE workers_crons (
	queue INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	revision BIGINT NOT NULL, 
	due BIGINT, 
	body TEXT NOT NULL, 
	PRIMARY KEY (queue, name)
);
CREATE TABLE workers_dependencies (
	queue INTEGER NOT NULL, 
	job_id TEXT NOT NULL, 
	dependent INTEGER NOT NULL, 
	fails INTEGER NOT NULL, 
	ended TEXT, 
	error TEXT, 
	PRIMARY KEY (queue, job_id, dependent)
);
CREATE TABLE workers_events (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	queue INTEGER NOT NULL, 
	process TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	at BIGINT NOT NULL, 
	result BLOB
);
CREATE TABLE workers_gates (
	queue INTEGER NOT NULL, 
	gate TEXT NOT NULL, 
	name TEXT NOT NULL, 
	full_at BIGINT, 
	opens_at BIGINT, 
	front INTEGER, 
	PRIMARY KEY (queue, gate, name)
);
CREATE TABLE workers_jobs (
	seq INTEGER NOT NULL, 
	queue INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	state TEXT NOT NULL, 
	priority INTEGER NOT NULL, 
	run_at BIGINT NOT NULL, 
	created_at BIGINT NOT NULL, 
	attempts INTEGER DEFAULT '0' NOT NULL, 
	max_attempts INTEGER NOT NULL, 
	stalls INTEGER DEFAULT '0' NOT NULL, 
	uncounted INTEGER DEFAULT '0' NOT NULL, 
	cancel_requested INTEGER DEFAULT '0' NOT NULL, 
	keep_completed BIGINT, 
	keep_failed BIGINT, 
	ordering_key TEXT, 
	backoff TEXT, 
	token BLOB, 
	worker TEXT, 
	lease_until BIGINT, 
	finished_at BIGINT, 
	expires_at BIGINT, 
	error TEXT, 
	progress BLOB, 
	chain_index INTEGER DEFAULT '0' NOT NULL, 
	deduplication_key TEXT, 
	deduplication_mode TEXT, 
	dependents INTEGER DEFAULT '0' NOT NULL, 
	follows INTEGER DEFAULT '0' NOT NULL, 
	meta TEXT, 
	failures TEXT, 
	PRIMARY KEY (seq)
);
INSERT INTO "workers_jobs" VALUES(1,1,'01a21f8c-7542-7758-a093-92c659b3c2bb','deliver-post','ready',0,1795825628701,1795825628701,0,5,0,0,0,86400000,604800000,NULL,'[5.0, 2.0, 3155760000.0, 0]',NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,NULL,0,0,NULL,NULL);
INSERT INTO "workers_jobs" VALUES(2,1,'01a21f8c-7607-7ec7-9048-db089e6f8d3a','deliver-post','ready',0,1795825628701,1795825628701,0,5,0,0,0,86400000,604800000,NULL,'[5.0, 2.0, 3155760000.0, 0]',NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,NULL,0,0,NULL,NULL);
INSERT INTO "workers_jobs" VALUES(3,1,'01a21f8c-760a-7730-8725-b0f2d12f2c08','deliver-post','ready',0,1795825628701,1795825628701,0,5,0,0,0,86400000,604800000,NULL,'[5.0, 2.0, 3155760000.0, 0]',NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,NULL,0,0,NULL,NULL);
CREATE TABLE workers_limits (
	queue INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	version INTEGER NOT NULL, 
	rate TEXT, 
	burst INTEGER, 
	concurrency INTEGER, 
	gap BIGINT, 
	capacity INTEGER NOT NULL, 
	PRIMARY KEY (queue, name)
);
CREATE TABLE workers_listeners (
	queue INTEGER NOT NULL, 
	process TEXT NOT NULL, 
	expires_at BIGINT NOT NULL, 
	PRIMARY KEY (queue, process)
);
CREATE TABLE workers_marks (
	queue INTEGER NOT NULL, 
	"key" TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	until BIGINT NOT NULL, 
	PRIMARY KEY (queue, "key")
);
CREATE TABLE workers_outcomes (
	queue INTEGER NOT NULL, 
	job_id TEXT NOT NULL, 
	other_queue TEXT NOT NULL, 
	other_id TEXT NOT NULL, 
	ended TEXT NOT NULL, 
	error TEXT, 
	result BLOB, 
	PRIMARY KEY (queue, job_id, other_queue, other_id)
);
CREATE TABLE workers_payloads (
	seq INTEGER NOT NULL, 
	data BLOB NOT NULL, 
	PRIMARY KEY (seq)
);
INSERT INTO "workers_payloads" VALUES(1,X'7B226E6F6465223A2268747470733A2F2F612E6578616D706C65222C226461746162617365223A2265353866653532312D626138642D346131302D393962342D633933626539623562666236222C2264656C69766572794A6F624964223A2230316132316638632D373534322D373735382D613039332D393263363539623363326262222C2274617267657455726C223A22687474703A2F2F3132372E302E302E313A372F6170692F617574682F736F6369616C2F706F737473222C2273657276657255726C223A22687474703A2F2F3132372E302E302E313A37222C227061796C6F6164223A22222C227061796C6F61644964223A2230316132316638632D373534322D373735382D613039332D393263363539623363326262227D');
INSERT INTO "workers_payloads" VALUES(2,X'7B226E6F6465223A2268747470733A2F2F612E6578616D706C65222C226461746162617365223A2265353866653532312D626138642D346131302D393962342D633933626539623562666236222C2264656C69766572794A6F624964223A2230316132316638632D373630372D376563372D393034382D646230383965366638643361222C2274617267657455726C223A22687474703A2F2F3132372E302E302E313A372F6170692F617574682F736F6369616C2F706F737473222C2273657276657255726C223A22687474703A2F2F3132372E302E302E313A37222C227061796C6F6164223A22222C227061796C6F61644964223A2230316132316638632D373630372D376563372D393034382D646230383965366638643361227D');
INSERT INTO "workers_payloads" VALUES(3,X'7B226E6F6465223A2268747470733A2F2F612E6578616D706C65222C226461746162617365223A2265353866653532312D626138642D346131302D393962342D633933626539623562666236222C2264656C69766572794A6F624964223A2230316132316638632D373630612D373733302D383732352D623066326431326632633038222C2274617267657455726C223A22687474703A2F2F3132372E302E302E313A372F6170692F617574682F736F6369616C2F706F737473222C2273657276657255726C223A22687474703A2F2F3132372E302E302E313A37222C227061796C6F6164223A22222C227061796C6F61644964223A2230316132316638632D373630612D373733302D383732352D623066326431326632633038227D');
CREATE TABLE workers_queues (
	id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	paused INTEGER DEFAULT '0' NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "workers_queues" VALUES(1,'federation-delivery',0);
INSERT INTO "workers_queues" VALUES(2,'federation-health-check',0);
INSERT INTO "workers_queues" VALUES(3,'federation-discovery',0);
INSERT INTO "workers_queues" VALUES(4,'federation-tasks',0);
CREATE TABLE workers_schema (
	version INTEGER NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "workers_schema" VALUES(11);
CREATE TABLE workers_seen (
	queue INTEGER NOT NULL, 
	worker TEXT NOT NULL, 
	seen_at BIGINT NOT NULL, 
	PRIMARY KEY (queue, worker)
);
CREATE UNIQUE INDEX "serverRegistry_publicKey_uidx" ON server_registry (public_key);
CREATE UNIQUE INDEX "serverRegistry_encryptionPublicKey_uidx" ON server_registry (encryption_public_key);
CREATE INDEX "serverRegistry_lastSeen_idx" ON server_registry (last_seen);
CREATE INDEX "blacklistedServers_serverUrl_idx" ON blacklisted_servers (server_url);
CREATE INDEX "rotateChallengeTokens_serverUrl_idx" ON rotate_challenge_tokens (server_url);
CREATE INDEX "follows_followerServerUrl_idx" ON follows (follower_server_url);
CREATE INDEX "follows_followingServerUrl_idx" ON follows (following_server_url);
CREATE INDEX blacklisted_servers_spelling_idx ON blacklisted_servers (id) WHERE server_url GLOB '*[^a-z0-9.:/*_-]*' OR server_url GLOB '*[/.]' OR server_url GLOB '*:*:*' OR ((server_url GLOB '*//[0-9]*' OR server_url GLOB '*.[0-9]*') AND server_url NOT GLOB '*.[a-z_-]*');
CREATE TRIGGER blacklist_insert AFTER INSERT ON blacklisted_servers
BEGIN
    UPDATE blacklist_revision SET revision = revision + 1;
END;
CREATE TRIGGER blacklist_update AFTER UPDATE ON blacklisted_servers
BEGIN
    UPDATE blacklist_revision SET revision = revision + 1;
END;
CREATE TRIGGER blacklist_delete AFTER DELETE ON blacklisted_servers
BEGIN
    UPDATE blacklist_revision SET revision = revision + 1;
END;
CREATE INDEX delivery_jobs_payload_id_idx ON delivery_jobs (payload_id) WHERE payload_id IS NOT NULL;
CREATE INDEX delivery_jobs_held_until_idx ON delivery_jobs (next_attempt_at) WHERE state = 'held';
CREATE INDEX delivery_jobs_suspect_idx ON delivery_jobs (suspect) WHERE suspect IS NOT NULL;
CREATE INDEX delivery_jobs_order_idx ON delivery_jobs (ordering_key, server_url, ordering_position) WHERE ordering_key IS NOT NULL;
CREATE INDEX delivery_jobs_state_idx ON delivery_jobs (state, created_at, id);
CREATE INDEX delivery_jobs_server_idx ON delivery_jobs (server_url, state, created_at, id);
CREATE INDEX delivery_jobs_code_idx ON delivery_jobs (error_code, created_at, id) WHERE error_code IS NOT NULL;
CREATE INDEX delivery_jobs_held_idx ON delivery_jobs (server_url, state, wire, held_reason, created_at) WHERE state = 'held';
CREATE INDEX delivery_jobs_released_idx ON delivery_jobs (state, released_at) WHERE released_at IS NOT NULL;
CREATE INDEX delivery_payloads_activity_id_idx ON delivery_payloads (activity_id) WHERE activity_id IS NOT NULL;
CREATE INDEX delivery_attempts_activity_id_idx ON delivery_attempts (activity_id) WHERE activity_id IS NOT NULL;
CREATE INDEX delivery_attempts_started_at_idx ON delivery_attempts (started_at);
CREATE INDEX delivery_attempts_server_url_started_at_idx ON delivery_attempts (server_url, started_at);
CREATE UNIQUE INDEX delivery_attempts_number_uidx ON delivery_attempts (delivery_id, series, attempt);
CREATE INDEX delivery_losses_lost_at_idx ON delivery_losses (lost_at);
CREATE INDEX server_links_probe_idx ON server_links (next_probe_at) WHERE next_probe_at IS NOT NULL;
CREATE INDEX server_links_release_idx ON server_links (release_at) WHERE release_at IS NOT NULL;
CREATE INDEX server_links_probed_idx ON server_links (probed_at) WHERE next_probe_at IS NOT NULL;
CREATE INDEX server_health_events_server_url_at_idx ON server_health_events (server_url, at);
CREATE INDEX server_health_events_at_idx ON server_health_events (at);
CREATE INDEX follow_news_server_url_noted_at_idx ON follow_news (server_url, noted_at);
CREATE INDEX follow_news_noted_at_idx ON follow_news (noted_at);
CREATE INDEX relay_candidates_rank_idx ON relay_candidates (rank);
CREATE INDEX admin_actions_at_idx ON admin_actions (at);
CREATE INDEX admin_actions_server_url_idx ON admin_actions (server_url, id) WHERE server_url IS NOT NULL;
CREATE INDEX bulk_jobs_open_idx ON bulk_jobs (id) WHERE finished_at IS NULL;
CREATE INDEX server_summaries_link_idx ON server_summaries (link, server_url);
CREATE INDEX server_summaries_advice_idx ON server_summaries (advice, server_url);
CREATE INDEX server_summaries_owed_idx ON server_summaries (owed, server_url);
CREATE INDEX server_summaries_link_owed_idx ON server_summaries (link, owed, server_url);
CREATE INDEX server_summaries_advice_owed_idx ON server_summaries (advice, owed, server_url);
CREATE INDEX server_summaries_held_idx ON server_summaries (held, server_url);
CREATE INDEX server_summaries_link_held_idx ON server_summaries (link, held, server_url);
CREATE INDEX server_summaries_advice_held_idx ON server_summaries (advice, held, server_url);
CREATE INDEX server_summaries_given_up_idx ON server_summaries (given_up, server_url);
CREATE INDEX server_summaries_link_given_up_idx ON server_summaries (link, given_up, server_url);
CREATE INDEX server_summaries_advice_given_up_idx ON server_summaries (advice, given_up, server_url);
CREATE INDEX server_summaries_score_idx ON server_summaries (score, server_url);
CREATE INDEX server_summaries_link_score_idx ON server_summaries (link, score, server_url);
CREATE INDEX server_summaries_advice_score_idx ON server_summaries (advice, score, server_url);
CREATE INDEX activitypub_actors_name_idx ON activitypub_actors (name, created_at);
CREATE INDEX activitypub_keys_actor_id_idx ON activitypub_keys (actor_id);
CREATE INDEX activitypub_inboxes_gone_at_idx ON activitypub_inboxes (gone_at);
CREATE UNIQUE INDEX activitypub_received_hash_uidx ON activitypub_received (activity_hash);
CREATE INDEX activitypub_received_open_idx ON activitypub_received (actor, number) WHERE state = 'new';
CREATE INDEX activitypub_received_failed_idx ON activitypub_received (number) WHERE state = 'failed';
CREATE INDEX activitypub_received_activity_id_idx ON activitypub_received (activity_id) WHERE activity_id IS NOT NULL;
CREATE INDEX activitypub_received_at_idx ON activitypub_received (received_at);
CREATE INDEX activitypub_remote_keys_owner_idx ON activitypub_remote_keys (owner);
CREATE INDEX activitypub_follows_remote_actor_idx ON activitypub_follows (remote_actor);
CREATE INDEX workers_crons_due ON workers_crons (queue, due) WHERE due IS NOT NULL;
CREATE INDEX workers_dependencies_by_dependent ON workers_dependencies (dependent);
CREATE INDEX workers_dependencies_ended ON workers_dependencies (queue) WHERE ended IS NOT NULL;
CREATE INDEX workers_gates_filling ON workers_gates (queue, full_at) WHERE full_at IS NOT NULL;
CREATE INDEX workers_gates_opening ON workers_gates (queue, opens_at) WHERE opens_at IS NOT NULL;
CREATE INDEX workers_jobs_busy_keys ON workers_jobs (queue, ordering_key) WHERE state = 'processing' AND ordering_key IS NOT NULL;
CREATE UNIQUE INDEX workers_jobs_by_deduplication_key ON workers_jobs (queue, deduplication_key) WHERE deduplication_key IS NOT NULL AND expires_at IS NULL;
CREATE UNIQUE INDEX workers_jobs_by_id ON workers_jobs (queue, id);
CREATE INDEX workers_jobs_delayed ON workers_jobs (queue, run_at) WHERE state IN ('scheduled', 'failing');
CREATE INDEX workers_jobs_finished ON workers_jobs (queue, state, expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX workers_jobs_held ON workers_jobs (queue, ordering_key, name, priority, run_at) WHERE state = 'held';
CREATE INDEX workers_jobs_leases ON workers_jobs (queue, lease_until) WHERE state = 'processing';
CREATE INDEX workers_jobs_ready ON workers_jobs (queue, priority, run_at) WHERE state = 'ready';
CREATE INDEX workers_jobs_ready_by_name ON workers_jobs (queue, name, priority, run_at) WHERE state = 'ready';
CREATE INDEX workers_jobs_waiting ON workers_jobs (queue, run_at) WHERE state = 'waiting';
CREATE INDEX workers_marks_ending ON workers_marks (queue, until);
CREATE TRIGGER workers_jobs_ended AFTER UPDATE OF state ON workers_jobs WHEN OLD.dependents AND OLD.expires_at IS NULL AND NEW.expires_at IS NOT NULL BEGIN UPDATE workers_dependencies SET ended = NEW.state, error = CASE NEW.state WHEN 'failed' THEN NEW.error END WHERE queue = NEW.queue AND job_id = NEW.id AND ended IS NULL; END;
CREATE TRIGGER workers_jobs_gone AFTER DELETE ON workers_jobs WHEN OLD.dependents AND OLD.expires_at IS NULL BEGIN UPDATE workers_dependencies SET ended = 'removed' WHERE queue = OLD.queue AND job_id = OLD.id AND ended IS NULL; END;
CREATE TRIGGER workers_jobs_waited AFTER UPDATE OF state ON workers_jobs WHEN OLD.state = 'waiting' AND NEW.state <> 'waiting' BEGIN DELETE FROM workers_dependencies WHERE dependent = OLD.seq; END;
CREATE TRIGGER workers_jobs_waited_gone AFTER DELETE ON workers_jobs WHEN OLD.state = 'waiting' BEGIN DELETE FROM workers_dependencies WHERE dependent = OLD.seq; END;
CREATE TRIGGER workers_jobs_follower_gone AFTER DELETE ON workers_jobs WHEN OLD.follows BEGIN DELETE FROM workers_outcomes WHERE queue = OLD.queue AND job_id = OLD.id; END;
DELETE FROM "sqlite_sequence";
COMMIT;
