/* The executable's first part: unpacks the program behind it once into a private folder, and becomes it.
 *
 * tools/pack.py appends to this static program: the files (one zstd frame), a manifest (one line a file: mode, size,
 * SHA-256, path) and the trailer below. At a start:
 *
 *   for each folder that may serve as cache (candidates()):
 *     open it, refusing what others could change                                        open_cache()
 *     there is <cache>/<id>, and every file in it is as it was left                     intact()
 *       or unpack into <cache>/.new-*, try it, rename it to <cache>/<id>, sweep         unpack(), sweep()
 *     execv <cache>/<id>/shardbox: same process, so signals and exit codes are its own  become()
 *   else say for each folder why not, and end with 125.
 *
 * Locks (flock, ended by the kernel with their holder): a shared one on <cache>/<id> goes with the process for its
 * life, so that nobody sweeps a version in use (systemd-tmpfiles respects it too); an exclusive one on <cache> lets one
 * process at a time change what is there. A file system without locks costs the sweeping, not the start.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <zstd.h>

enum { CANNOT_START = 125, DIRECTORY = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC };

struct trailer { /* the last bytes of the executable; little-endian, as the machines it is for */
    uint64_t payload_at, payload_size, unpacked_size, manifest_at, manifest_size;
    char id[32];   /* hex digits of the manifest's SHA-256: the folder's name */
    char glibc[8]; /* highest symbol version that the program asks for, such as "2.28" */
    char magic[8];
    uint8_t sha256[32]; /* of everything before; `shardbox version --verify` checks it */
};

struct entry { /* one file or symbolic link of the program, in the payload's order */
    char *path;
    mode_t mode;
    uint64_t size;
};

static struct trailer trailer;
static struct entry *entries;
static size_t entry_count;
static int self = -1;            /* this executable */
static char self_path[PATH_MAX]; /* and its name, symbolic links followed */
static char id[33], boot[64];
static char reasons[6000]; /* why each folder tried so far does not serve */

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("shardbox: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    exit(CANNOT_START);
}

static int no(const char *folder, const char *why) { /* always -1 */
    size_t used = strlen(reasons);
    snprintf(reasons + used, sizeof reasons - used, "\n  %s: %s", folder, why);
    return -1;
}

/* --- this executable ------------------------------------------------------------------------------------ */

__attribute__((noreturn)) static void damaged(void) { die("%s is damaged or cut short: copy it again", self_path); }

static void *mapped(uint64_t at, uint64_t size) {
    uint64_t skip = at % (uint64_t)sysconf(_SC_PAGESIZE);
    char *start = mmap(NULL, size + skip, PROT_READ | PROT_WRITE, MAP_PRIVATE, self, (off_t)(at - skip));
    if (start == MAP_FAILED) die("cannot read %s: %s", self_path, strerror(errno));
    return start + skip;
}

static void read_self(void) {
    self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    ssize_t length = readlink("/proc/self/exe", self_path, sizeof self_path - 1);
    if (self < 0 || length < 0) die("cannot find itself (%s): /proc must be mounted", strerror(errno));
    int64_t end = lseek(self, 0, SEEK_END) - (int64_t)sizeof trailer;
    if (end < 0 || pread(self, &trailer, sizeof trailer, end) != sizeof trailer || memcmp(trailer.magic, "SHARDBX1", 8) ||
        trailer.manifest_at + trailer.manifest_size != (uint64_t)end || !trailer.manifest_size ||
        trailer.payload_at + trailer.payload_size != trailer.manifest_at || trailer.id[31] == 0)
        damaged();
    memcpy(id, trailer.id, 32);
    char *line = mapped(trailer.manifest_at, trailer.manifest_size), *stop = line + trailer.manifest_size;
    entries = calloc(trailer.manifest_size / 70 + 1, sizeof *entries); /* a line has more than 70 bytes */
    if (!entries) die("out of memory");
    uint64_t sum = 0;
    for (char *next; line < stop; line = next) { /* "100755 12345 <64 hex digits> path\n" */
        if (!(next = memchr(line, '\n', (size_t)(stop - line)))) damaged();
        *next++ = 0;
        struct entry *entry = &entries[entry_count++];
        entry->mode = (mode_t)strtoul(line, &line, 8);
        entry->size = strtoull(line, &line, 10);
        if (next - line < 68) damaged();
        entry->path = line + 66;
        sum += entry->size;
    }
    if (sum != trailer.unpacked_size) damaged();
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && read(fd, boot, sizeof boot - 1) < 0) boot[0] = 0;
    if (fd >= 0) close(fd);
}

static const char *payload(void) { /* all files, one after the other */
    static char *whole;
    if (whole) return whole;
    whole = mmap(NULL, trailer.unpacked_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED) die("out of memory: unpacking needs %zu MB", (size_t)(trailer.unpacked_size >> 20));
    size_t size = ZSTD_decompress(whole, trailer.unpacked_size, mapped(trailer.payload_at, trailer.payload_size),
                                  trailer.payload_size); /* the frame has a checksum */
    if (ZSTD_isError(size) || size != trailer.unpacked_size) damaged();
    return whole;
}

/* --- the cache folder ----------------------------------------------------------------------------------- */

static bool trusted(const struct stat *it) { /* only root and we can put something else in its place */
    return (it->st_uid == 0 || it->st_uid == geteuid()) && (!(it->st_mode & 022) || it->st_mode & S_ISVTX);
}

/* An open, safe, writable folder where programs may run, made if need be; its real name in `real`. Or -1. */
static int open_cache(const char *folder, char real[PATH_MAX]) {
    char part[PATH_MAX];
    struct stat it;
    struct statvfs system;
    if (strlen(folder) > PATH_MAX - 200) return no("a folder", "its name is too long");
    strcpy(part, folder);
    for (char *slash = part + 1;; slash++) {
        bool last = !(slash = strchrnul(slash, '/'))[0];
        *slash = 0;
        int problem = mkdir(part, 0700) ? errno : 0;
        if (problem && problem != EEXIST && access(part, F_OK)) return no(folder, strerror(problem));
        if (last) break;
        *slash = '/';
    }
    if (!realpath(folder, real)) return no(folder, strerror(errno));
    if (strlen(real) > PATH_MAX - 200) return no(folder, "its name is too long");
    int fd = open(real, DIRECTORY);
    if (fd < 0 || fstat(fd, &it) || fstatvfs(fd, &system)) return no(folder, strerror(errno));
    const char *why = it.st_uid != geteuid()     ? "belongs to another user"
                      : it.st_mode & 022         ? "others may write to it"
                      : system.f_flag & ST_NOEXEC ? "is mounted noexec"
                                                  : NULL;
    strcpy(part, real);
    for (char *slash; !why && (slash = strrchr(part, '/'));) { /* every folder above it */
        slash[slash == part] = 0;
        if (stat(part, &it) || !trusted(&it)) why = "another user may replace it: a folder above it is not safe";
        if (slash == part) break;
    }
    if (!why) return fd;
    close(fd);
    return no(folder, why);
}

static void remove_tree(int parent, const char *name) {
    int fd = openat(parent, name, DIRECTORY);
    DIR *folder = fd < 0 ? NULL : fdopendir(fd);
    if (!folder) {
        unlinkat(parent, name, 0);
        return;
    }
    for (struct dirent *item; (item = readdir(folder));)
        if (strcmp(item->d_name, ".") && strcmp(item->d_name, "..")) remove_tree(fd, item->d_name);
    closedir(folder);
    unlinkat(parent, name, AT_REMOVEDIR);
}

/* Remove other versions and what killed runs left, unless a process holds them. */
static void sweep(int cache) {
    int fd = openat(cache, ".", DIRECTORY);
    DIR *folder = fd < 0 ? NULL : fdopendir(fd);
    for (struct dirent *item; folder && (item = readdir(folder));) {
        const char *name = item->d_name;
        bool version = strlen(name) == 32 && strspn(name, "0123456789abcdef") == 32 && strcmp(name, id);
        if (!version && strncmp(name, ".new-", 5) && strncmp(name, ".old-", 5)) continue;
        struct stat now, held;
        int it = openat(cache, name, DIRECTORY);
        if (it >= 0 && !flock(it, LOCK_EX | LOCK_NB) && !fstat(it, &held) &&
            !fstatat(cache, name, &now, AT_SYMLINK_NOFOLLOW) && now.st_ino == held.st_ino)
            remove_tree(cache, name);
        if (it >= 0) close(it);
    }
    if (folder) closedir(folder);
}

static void unique(char name[64], const char *prefix) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(name, 64, "%s%d-%llx%lx", prefix, getpid(), (long long)now.tv_sec, now.tv_nsec);
}

/* --- the unpacked files --------------------------------------------------------------------------------- */

static bool same_bytes(int folder, const struct entry *entry, const char *wanted) {
    if (S_ISLNK(entry->mode)) {
        char target[PATH_MAX];
        ssize_t length = readlinkat(folder, entry->path, target, sizeof target);
        return length == (ssize_t)entry->size && !memcmp(target, wanted, entry->size);
    }
    int fd = openat(folder, entry->path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return false;
    char block[1 << 16];
    uint64_t seen = 0;
    for (ssize_t got; (got = read(fd, block, sizeof block)) > 0; seen += (uint64_t)got)
        if (seen + (uint64_t)got > entry->size || memcmp(block, wanted + seen, (size_t)got)) break;
    close(fd);
    return seen == entry->size;
}

/* The mark of a whole folder: written last, holds the boot in which its bytes were last known to be right. */
static bool write_mark(int folder) {
    int fd = openat(folder, ".whole~", O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return false;
    bool good = write(fd, boot, strlen(boot)) == (ssize_t)strlen(boot);
    return !close(fd) && good && !renameat(folder, ".whole~", folder, ".whole");
}

/* Every file is there, ours, of the right kind and size, and unchanged since the mark was written (ctime, which no
 * program can set back). After a boot, which may have lost what was not on disk yet, also byte by byte. */
static bool intact(int folder) {
    struct stat mark, it;
    char then[sizeof boot] = "";
    int fd = openat(folder, ".whole", O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return false;
    bool known = !fstat(fd, &mark) && read(fd, then, sizeof then - 1) >= 0 && !strcmp(then, boot);
    close(fd);
    const char *wanted = known ? NULL : payload();
    for (size_t n = 0; n < entry_count; n++) {
        const struct entry *entry = &entries[n];
        if (fstatat(folder, entry->path, &it, AT_SYMLINK_NOFOLLOW) || it.st_uid != geteuid() ||
            it.st_mode != entry->mode || (uint64_t)it.st_size != entry->size)
            return false;
        if (known && (it.st_ctim.tv_sec > mark.st_ctim.tv_sec || (it.st_ctim.tv_sec == mark.st_ctim.tv_sec &&
                                                                  it.st_ctim.tv_nsec > mark.st_ctim.tv_nsec)))
            return false;
        if (!known && !same_bytes(folder, entry, wanted)) return false;
        if (!known) wanted += entry->size;
    }
    return known || write_mark(folder);
}

static bool write_file(int folder, const struct entry *entry, const char *bytes) {
    char part[PATH_MAX];
    if (strlen(entry->path) >= sizeof part) return false;
    strcpy(part, entry->path);
    for (char *slash = part; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        if (mkdirat(folder, part, 0700) && errno != EEXIST) return false;
    }
    if (S_ISLNK(entry->mode)) {
        if (entry->size >= sizeof part) return false;
        memcpy(part, bytes, entry->size);
        part[entry->size] = 0;
        return !symlinkat(part, folder, entry->path);
    }
    int fd = openat(folder, entry->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return false;
    uint64_t done = 0;
    for (ssize_t put; done < entry->size && (put = write(fd, bytes + done, entry->size - done)) > 0;)
        done += (uint64_t)put;
    bool good = done == entry->size && !fchmod(fd, entry->mode & 0777);
    return !close(fd) && good; /* some file systems say at the close that the disk is full */
}

/* --- running it ----------------------------------------------------------------------------------------- */

static void become(const char *program, int folder, char **argv) { /* returns only with errno set */
    char number[16];
    snprintf(number, sizeof number, "%d", folder);
    fcntl(folder, F_SETFD, 0); /* the lock goes along; the program keeps it from its own children */
    if (!setenv("_SHARDBOX_LOCK", number, 1) && !setenv("_SHARDBOX_FILE", self_path, 1)) execv(program, argv);
    int problem = errno;
    fcntl(folder, F_SETFD, FD_CLOEXEC);
    errno = problem;
}

/* Run the new folder's program once: 0, the errno of a refused exec, or -1 with `said` where the system is too old. */
static int try_out(const char *program, int folder, char said[512]) {
    int ends[2], status = 0;
    if (pipe2(ends, O_CLOEXEC)) return errno;
    pid_t child = fork();
    if (child < 0) return errno;
    if (!child) {
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);
        char *argv[] = {"shardbox", "version", NULL};
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* it holds the folder's lock */
        if (null >= 0) dup2(null, 0), dup2(null, 1);
        dup2(ends[1], 2);
        become(program, folder, argv);
        _exit(errno == ENOENT ? 127 : 126);
    }
    close(ends[1]);
    size_t length = 0;
    for (ssize_t got; length < 511 && (got = read(ends[0], said + length, 511 - length)) > 0;) length += (size_t)got;
    said[length] = 0;
    said[strcspn(said, "\n")] = 0;
    close(ends[0]);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 126 && !length) return EACCES;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127 && !length)
        strcpy(said, "there is no loader of glibc (a musl-only system?)");
    else if (!length)
        snprintf(said, 512, "a trial ended with wait status %d", status);
    return -1;
}

/* Unpack into a folder of its own, try it, give it its name. An open descriptor, its lock shared; or -1. */
static int unpack(int cache, const char *real) {
    char name[64], program[PATH_MAX], said[512];
    struct stat it;
    const char *bytes = payload();
    unique(name, ".new-");
    if (mkdirat(cache, name, 0700)) return no(real, strerror(errno));
    int folder = openat(cache, name, DIRECTORY), problem = 0;
    if (folder < 0 || (flock(folder, LOCK_SH), fstat(folder, &it)) || !it.st_nlink) return no(real, strerror(errno));
    for (size_t n = 0; !problem && n < entry_count; bytes += entries[n++].size)
        if (!write_file(folder, &entries[n], bytes)) problem = errno ? errno : ENOSPC;
    if (!problem && !write_mark(folder)) problem = errno ? errno : ENOSPC;
    snprintf(program, sizeof program, "%s/%s/shardbox", real, name);
    if (!problem) problem = try_out(program, folder, said);
    if (!problem && renameat(cache, name, cache, id)) problem = errno;
    if (!problem) sweep(cache); /* again: what the first found in use by a process that was just being killed */
    if (!problem) return folder;
    close(folder);
    remove_tree(cache, name);
    if (problem < 0)
        die("this system cannot run it: %s\nhint: it needs Linux with glibc %.8s or newer", said, trailer.glibc);
    return no(real, problem == EACCES ? "programs may not run from there" : strerror(problem));
}

/* The program's folder in this cache, whole and locked; or -1. */
static int find_or_unpack(int cache, const char *real) {
    for (int change = 0;; change = 1) { /* first look; then look again as the only one who may change things */
        int folder = openat(cache, id, DIRECTORY);
        if (folder >= 0) flock(folder, LOCK_SH);
        if (folder >= 0 && intact(folder)) return folder;
        if (folder >= 0) close(folder);
        if (change) break;
        flock(cache, LOCK_EX);
    }
    char old[64];
    unique(old, ".old-");
    if (renameat(cache, id, cache, old) && errno != ENOENT) return no(real, strerror(errno));
    sweep(cache); /* before unpacking: it may make room */
    return unpack(cache, real);
}

static void start_from(const char *cache_folder, char **argv) { /* returns where that cannot be */
    char real[PATH_MAX], program[PATH_MAX];
    int cache = open_cache(cache_folder, real);
    int folder = cache < 0 ? -1 : find_or_unpack(cache, real);
    if (cache >= 0) close(cache);
    if (folder < 0) return;
    snprintf(program, sizeof program, "%s/%s/shardbox", real, id);
    become(program, folder, argv);
    no(real, errno == EACCES ? "programs may not run from there" : strerror(errno));
    close(folder);
}

static const char *absolute(const char *variable) {
    const char *value = getenv(variable);
    return value && *value == '/' ? value : NULL;
}

int main(int argc, char **argv) {
    char path[PATH_MAX], *alone[] = {"shardbox", NULL};
    const char *given;
    if (argc < 1) argv = alone;
    for (int fd = 0; fd >= 0 && fd < 3;) fd = open("/dev/null", O_RDWR); /* no file of ours may get a closed one's number */
    read_self();
    if ((given = getenv("SHARDBOX_CACHE_DIR")) && *given) { /* an order: no other will do */
        if (*given != '/') die("SHARDBOX_CACHE_DIR must be an absolute path, got %s", given);
        start_from(given, argv);
        die("cannot unpack:%s\nhint: SHARDBOX_CACHE_DIR must name a folder of yours, not mounted noexec, with %zu MB free",
            reasons, (size_t)(trailer.unpacked_size >> 20) + 1);
    }
    const struct {
        const char *base, *rest;
    } candidates[] = {
        {absolute("XDG_CACHE_HOME"), "/shardbox"},
        {absolute("XDG_CACHE_HOME") ? NULL : absolute("HOME"), "/.cache/shardbox"},
        {geteuid() ? NULL : "/var/cache", "/shardbox"}, /* services of root have no HOME */
        {"/var/tmp", "/shardbox-"},
        {absolute("TMPDIR"), "/shardbox-"},
        {"/tmp", "/shardbox-"},
        {"/dev/shm", "/shardbox-"},
    };
    for (size_t n = 0; n < sizeof candidates / sizeof *candidates; n++) {
        const char *base = candidates[n].base, *rest = candidates[n].rest;
        char user[16] = "";
        if (!base) continue;
        if (n && access(base, F_OK)) {
            no(base, strerror(errno));
            continue;
        }
        if (rest[strlen(rest) - 1] == '-') snprintf(user, sizeof user, "%u", geteuid());
        if (snprintf(path, sizeof path, "%s%s%s", base, rest, user) >= (int)sizeof path)
            no(base, "its name is too long");
        else
            start_from(path, argv);
    }
    die("nowhere to unpack to:%s\nhint: set SHARDBOX_CACHE_DIR to a folder of yours, not mounted noexec, with %zu MB free",
        reasons, (size_t)(trailer.unpacked_size >> 20) + 1);
}
