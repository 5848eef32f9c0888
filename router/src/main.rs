/// See docs/decisions/0014.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    std::process::exit(baton_router::run(std::env::args().collect()));
}
