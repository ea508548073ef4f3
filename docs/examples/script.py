"""A script that publishes a post of a local user: `python script.py alice "hello, fediverse"`."""

import asyncio
import sys

import federation


async def main(author: str, text: str) -> None:
    async with federation.transaction() as session:  # commits at the end; your own writes go into the same session
        post = await federation.publish_post(session, author_id=author, content=[{"type": "text", "value": text}])
    print(f"{post.post_id} is published; deliveries owed: {len(post.delivery_ids)}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
