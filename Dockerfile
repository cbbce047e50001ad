# Builds hames and puts it on a small system. tests/it/containers.rs checks what is said here.

# The version of rust-toolchain.toml, which is not copied: it would have rustup fetch what no build needs.
FROM rust:1.95.0-bookworm AS build
WORKDIR /src

# The dependencies by themselves: this layer stays as long as the two files do.
COPY Cargo.toml Cargo.lock ./
RUN mkdir -p src benches \
    && echo 'fn main() {}' > src/main.rs \
    && touch src/lib.rs benches/micro.rs \
    && cargo build --release --locked \
    && rm -r src

COPY migrations migrations
COPY src src
# Files are copied with their times, which may lie before those of the empty ones.
RUN touch src/main.rs src/lib.rs && cargo build --release --locked

FROM debian:bookworm-slim
# Providers are reached over TLS with the system's certificates. The user has numbers, for platforms that look at no names.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 hames \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/hames --no-create-home --shell /usr/sbin/nologin hames \
    && install -d -o 10001 -g 10001 -m 0700 /var/lib/hames
COPY LICENSE LICENSE-APACHE LICENSE-MIT /usr/share/doc/hames/
COPY --from=build /src/target/release/hames /usr/local/bin/hames

LABEL org.opencontainers.image.title="hames" \
      org.opencontainers.image.description="An HTTP service that executes LLM agents." \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="MIT OR Apache-2.0"

USER 10001:10001
# Relative paths of the settings lead into the volume, so that no variable has to overrule a settings file. All else can be
# read only.
WORKDIR /var/lib/hames
VOLUME /var/lib/hames
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["hames", "health"]
ENTRYPOINT ["hames"]
CMD ["serve"]
