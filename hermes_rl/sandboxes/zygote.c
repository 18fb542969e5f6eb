/*
 * zygote: starts sandboxes for one worker, each with one clone of this small process.
 *
 *     zygote SOCKET FILTER TAG          SOCKET and FILTER are numbers of inherited descriptors
 *
 * hermes_rl/sandboxes/zygote.py is its only client. bubblewrap is the reference: a sandbox of this
 * program must be like one of bubblewrap's, and the same tests run on both.
 *
 * Who trusts whom
 *   The worker is trusted. It holds the other end of SOCKET, a pair without a name, so nobody else
 *   can send requests. A sandbox is not trusted. It gets no descriptor but its standard ones, does
 *   not see this process (a PID namespace of its own), and nothing that it writes is ever read here.
 *   This process is never root of the machine: it runs as an unprivileged user in a user namespace,
 *   where it has capabilities over its own namespaces only. Where the worker is root, that namespace
 *   knows the user ids of sandboxes and no others; where the worker is an ordinary user, his alone.
 *
 * Messages (SOCK_SEQPACKET: one message is one packet)
 *   Strings are separated by NUL bytes. Numbers in strings are decimal.
 *   start-up   zygote -> worker  "U DIGEST"     in its user namespace; the worker writes the maps
 *              worker -> zygote  setup: operations that make the root of all sandboxes
 *              zygote -> worker  "R", or "E MESSAGE" and the end
 *   request    worker -> zygote  see `parse`; descriptors come along: standard input and output of
 *                                the sandbox, `cgroups` descriptors of cgroup.procs, then mounts
 *   answers    zygote -> worker  "S PID" with a pidfd; "F ERRNO" when there was no clone;
 *                                "X PID STATUS" (as waitpid has it) once PID has been waited for
 *   The worker closing its end, or dying, ends this process, and with it all its sandboxes.
 *
 * Operations (paths are relative to the root of this process's mount namespace)
 *   d PATH             make a directory
 *   l TARGET PATH      make a symbolic link
 *   t PATH OPTIONS     mount a tmpfs         o PATH OPTIONS  mount an overlay
 *   b SOURCE PATH      bind, read-only       B SOURCE PATH   bind, writable
 *   n SOURCE PATH      bind a device node
 *   m PATH             attach the next descriptor of the request, a detached mount
 *   r PATH             make a mount read-only
 *   In a setup SOURCE is an absolute path of the machine; in a request it is one below this root,
 *   where no symbolic link and no ".." is followed.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "no seccomp filter is shipped for this architecture"
#endif

#ifndef DIGEST
#define DIGEST "none" /* of this source: the worker asks for it */
#endif
#define MESSAGE_MAX 65536
#define STRINGS_MAX 512
#define FDS_MAX 8
#define FILTER_MAX 4096 /* instructions; the kernel's own limit */
#define NAMESPACES \
    (CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)

/* Of newer kernels than some C libraries: the numbers are the same on all architectures. */
#define SYS_OPEN_TREE 428
#define SYS_MOVE_MOUNT 429
#define SYS_CLONE3 435
#define SYS_CLOSE_RANGE 436
#define SYS_OPENAT2 437
#define SYS_MOUNT_SETATTR 442
#define TREE_CLONE 1
#define TREE_CLOEXEC O_CLOEXEC
#define MOVE_FROM_EMPTY_PATH 4
#define RECURSIVE 0x8000
#define EMPTY_PATH 0x1000
#define ATTR_RDONLY 1
#define ATTR_NOSUID 2
#define ATTR_NODEV 4
#define RESOLVE_NO_MAGIC 2
#define RESOLVE_NO_LINKS 4
#define RESOLVE_BELOW 8
#ifndef CLONE_PIDFD
#define CLONE_PIDFD 0x1000
#endif

struct attributes {
    uint64_t set, clear, propagation, userns;
};
struct how {
    uint64_t flags, mode, resolve;
};
struct clone_arguments {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls;
};

static int worker_socket;
static int proc_fd = -1; /* the machine's /proc: a sandbox's own is read-only from the first moment */
static struct sock_fprog filter;

/* The reason goes to the worker: before a clone over the socket, in a sandbox over its output. */
static int errors_to_output;

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...)
{
    char text[512];
    int number = errno, length;
    va_list values;
    va_start(values, format);
    length = snprintf(text, sizeof text, "E ");
    length += vsnprintf(text + length, sizeof text - length, format, values);
    va_end(values);
    if (length > (int)sizeof text - 64)
        length = sizeof text - 64;
    length += snprintf(text + length, sizeof text - length, ": %s\n", strerror(number));
    if (errors_to_output)
        (void)!write(STDOUT_FILENO, text + 2, length - 2);
    else
        send(worker_socket, text, length - 1, MSG_NOSIGNAL);
    _exit(125);
}

/* Splits a message; each string ends with a NUL byte, the last one too. */
static size_t split(char *data, size_t size, char **strings)
{
    size_t count = 0;
    if (size == 0 || data[size - 1] != 0)
        return 0;
    for (char *at = data; at < data + size; at += strlen(at) + 1) {
        if (count == STRINGS_MAX)
            return 0;
        strings[count++] = at;
    }
    return count;
}

static void write_proc(const char *name, const char *text)
{
    int fd = openat(proc_fd, name, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0)
        fail("%s", name);
    close(fd);
}

/* --- mounts -------------------------------------------------------------------------------- */

static void set_attributes(int fd, const char *path, unsigned flags, uint64_t set)
{
    struct attributes wanted = {.set = set};
    if (syscall(SYS_MOUNT_SETATTR, fd, path, flags, &wanted, sizeof wanted) < 0)
        fail("mount_setattr %s", path);
}

/* A mount that is attached nowhere yet, of a path of the machine or of one below our root. */
static int open_source(const char *source, int below)
{
    char path[4096];
    struct how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_NO_MAGIC};
    if (below)
        how.resolve |= RESOLVE_BELOW | RESOLVE_NO_LINKS;
    if (snprintf(path, sizeof path, "%s%s", below ? "" : "old", source) >= (int)sizeof path)
        errno = ENAMETOOLONG, fail("%s", source);
    int fd = syscall(SYS_OPENAT2, AT_FDCWD, path, &how, sizeof how);
    if (fd < 0)
        fail("open %s", source);
    int tree = syscall(SYS_OPEN_TREE, fd, "", TREE_CLONE | TREE_CLOEXEC | EMPTY_PATH | RECURSIVE);
    if (tree < 0)
        fail("open_tree %s", source);
    close(fd);
    return tree;
}

static void attach(int tree, const char *path)
{
    if (syscall(SYS_MOVE_MOUNT, tree, "", AT_FDCWD, path, MOVE_FROM_EMPTY_PATH) < 0)
        fail("move_mount %s", path);
    close(tree);
}

static void make_node(const char *path)
{
    int fd = open(path, O_CREAT | O_EXCL | O_CLOEXEC | O_WRONLY | O_NOFOLLOW, 0666);
    if (fd < 0)
        fail("create %s", path);
    close(fd);
}

static void bind_mount(const char *source, const char *path, int below, uint64_t attributes)
{
    int tree = open_source(source, below);
    set_attributes(tree, "", EMPTY_PATH | RECURSIVE, attributes);
    attach(tree, path);
}

static void mount_new(const char *type, const char *path, unsigned long flags, const char *options)
{
    if (mount(type, path, type, flags, options) < 0)
        fail("mount %s", path);
}

/* Runs operations. Returns how many of `fds` were used. */
static int operate(char **words, size_t count, int *fds, int fd_count, int below)
{
    int used = 0;
    size_t at = 0;
    while (at < count) {
        const char *kind = words[at++];
        size_t wanted = strchr("dmr", kind[0]) ? 1 : 2;
        if (strlen(kind) != 1 || !strchr("dltobBnmr", kind[0]) || count - at < wanted) {
            errno = EPROTO;
            fail("operation %s", kind);
        }
        const char *first = words[at], *second = wanted == 2 ? words[at + 1] : "";
        at += wanted;
        switch (kind[0]) {
        case 'd':
            if (mkdir(first, 0755) < 0)
                fail("mkdir %s", first);
            break;
        case 'l':
            if (symlink(first, second) < 0)
                fail("symlink %s", second);
            break;
        case 't':
            mount_new("tmpfs", first, MS_NOSUID | MS_NODEV, second);
            break;
        case 'o':
            mount_new("overlay", first, MS_NOSUID | MS_NODEV, second);
            break;
        case 'b':
            bind_mount(first, second, below, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV);
            break;
        case 'B':
            bind_mount(first, second, below, ATTR_NOSUID | ATTR_NODEV);
            break;
        case 'n':
            make_node(second);
            bind_mount(first, second, below, ATTR_NOSUID);
            break;
        case 'm':
            if (used == fd_count) {
                errno = EPROTO;
                fail("no descriptor for %s", first);
            }
            set_attributes(fds[used], "", EMPTY_PATH, ATTR_NOSUID | ATTR_NODEV);
            attach(fds[used++], first);
            break;
        case 'r':
            set_attributes(AT_FDCWD, first, 0, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV);
            break;
        }
    }
    return used;
}

/* Makes `path` the root of this mount namespace, on which the old root is stacked ... */
static void enter_root(const char *path)
{
    if (chdir(path) < 0 || syscall(SYS_pivot_root, ".", ".") < 0)
        fail("pivot_root");
}

/* ... and lets go of the old root, with everything in it. */
static void leave_machine(void)
{
    if (umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
        fail("umount the old root");
}

/* --- one sandbox --------------------------------------------------------------------------- */

struct request {
    uid_t uid, gid;          /* of the machine; 1000 inside */
    const char *root;        /* the prepared root, or one that the operations make */
    const char *directory;   /* the working directory */
    rlim_t processes, memory, file, files;
    int cgroups;             /* descriptors for cgroup.procs */
    char **operations;
    size_t operation_count;
    char **argv, **envp;     /* end with NULL */
    int fds[FDS_MAX], fd_count;
};

static unsigned long long number(const char *text)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || end == text || *end)
        return ~0ULL;
    return value;
}

/*
 * UID GID PROCESSES MEMORY FILE FILES CGROUPS ROOT DIRECTORY, then three lists, each as its length and its
 * strings: operations, the command line, the environment. Returns 0, or -1 for anything else.
 */
static int parse(char **words, size_t count, struct request *request)
{
    static char *lists[3][STRINGS_MAX + 1];
    size_t lengths[3], at = 9;
    unsigned long long values[7];
    if (count < 12)
        return -1;
    for (int i = 0; i < 7; i++)
        if ((values[i] = number(words[i])) == ~0ULL)
            return -1;
    for (int i = 0; i < 2; i++)
        if (values[i] == 0 || values[i] >= 0xffffffffULL)
            return -1; /* never as root, whatever the namespace calls it */
    if (values[6] > 2)
        return -1;
    for (int list = 0; list < 3; list++) {
        if (at >= count)
            return -1;
        unsigned long long length = number(words[at++]);
        if (length > count - at)
            return -1;
        memcpy(lists[list], words + at, length * sizeof *words);
        lists[list][length] = NULL;
        lengths[list] = length;
        at += length;
    }
    if (at != count || lengths[1] == 0 || request->fd_count < 1 + (int)values[6])
        return -1;
    request->uid = values[0], request->gid = values[1];
    request->root = words[7], request->directory = words[8];
    request->processes = values[2], request->memory = values[3];
    request->file = values[4], request->files = values[5];
    request->cgroups = values[6];
    request->operations = lists[0], request->operation_count = lengths[0];
    request->argv = lists[1], request->envp = lists[2];
    return 0;
}

static void limit(int which, rlim_t most, rlim_t hard)
{
    struct rlimit wanted = {most, hard};
    if (setrlimit(which, &wanted) < 0)
        fail("setrlimit %d", which);
}

/* Loopback alone: 127.0.0.1 comes with the interface. */
static void raise_loopback(void)
{
    struct ifreq wanted = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &wanted) < 0)
        fail("loopback");
    close(fd);
}

/*
 * A user namespace of its own: with it the sandbox loses all power over the namespaces that it is
 * in, and its processes are counted by themselves (RLIMIT_NPROC). No further one can be made.
 */
static void enter_user_namespace(uid_t uid, gid_t gid)
{
    char map[64];
    if (unshare(CLONE_NEWUSER) < 0)
        fail("unshare");
    prctl(PR_SET_DUMPABLE, 1); /* else the maps belong to root; the exec that follows resets it */
    snprintf(map, sizeof map, "1000 %u 1", uid);
    write_proc("self/uid_map", map);
    write_proc("self/setgroups", "deny");
    snprintf(map, sizeof map, "1000 %u 1", gid);
    write_proc("self/gid_map", map);
    write_proc("sys/user/max_user_namespaces", "0");
}

static void drop_capabilities(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2] = {{0}};
    int cap = 0;
    while (prctl(PR_CAPBSET_DROP, cap) == 0)
        cap++;
    if (errno != EINVAL || prctl(PR_CAPBSET_READ, cap) >= 0)
        fail("bounding set");
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0)
        fail("ambient set");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        fail("no_new_privs");
    if (syscall(SYS_capset, &header, none) < 0)
        fail("capset");
}

/* Process 1 of a sandbox, from the clone to its exec. */
__attribute__((noreturn)) static void become_sandbox(struct request *request, const int *life)
{
    sigset_t none;
    struct pollfd parent = {.fd = life[0]};
    int cgroups = request->cgroups, *mounts = request->fds + 1 + cgroups;

    if (dup2(request->fds[0], 0) < 0 || dup2(request->fds[0], 1) < 0 || dup2(request->fds[0], 2) < 0)
        _exit(125);
    errors_to_output = 1;
    close(worker_socket);
    close(life[1]);
    for (int i = 1; i <= cgroups; i++)
        if (write(request->fds[i], "0", 1) < 0)
            fail("cgroup");
    write_proc("self/oom_score_adj", "1000");
    setsid();

    /* From here on as the sandbox's user, so that what is mounted belongs to it. In this user
     * namespace user 0 does not exist, so the capabilities over our namespaces stay. */
    if (syscall(SYS_setresgid, request->gid, request->gid, request->gid) < 0 ||
        syscall(SYS_setresuid, request->uid, request->uid, request->uid) < 0)
        fail("setresuid");
    umask(0);
    operate(request->operations, request->operation_count, mounts,
            request->fd_count - 1 - cgroups, 1);
    enter_root(request->root);
    mount_new("proc", "/proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    mount_new("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620");
    leave_machine();
    raise_loopback();
    if (sethostname("sandbox", 7) < 0)
        fail("sethostname");
    enter_user_namespace(request->uid, request->gid);
    umask(022);
    if (chdir(request->directory) < 0)
        fail("chdir %s", request->directory);
    limit(RLIMIT_NPROC, request->processes, request->processes);
    limit(RLIMIT_FSIZE, request->file, request->file);
    limit(RLIMIT_NOFILE, request->files, request->files);
    limit(RLIMIT_CORE, 0, 0);
    /* Where a control group bounds the memory, a program that reserves much more than it uses, such
     * as a browser, may raise this one. */
    limit(RLIMIT_AS, request->memory, cgroups ? RLIM_INFINITY : request->memory);
    drop_capabilities();

    /* The changes of identity above would have cleared it. Who died before it was set has closed
     * the other end of `life`. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || poll(&parent, 1, 0) != 0)
        _exit(125);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    if (syscall(SYS_CLOSE_RANGE, 3, ~0U, 0) < 0)
        fail("close_range");
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) < 0)
        fail("seccomp");
    execve(request->argv[0], request->argv, request->envp);
    fail("exec %s", request->argv[0]);
}

/* --- the loop ------------------------------------------------------------------------------ */

static void answer(const char *text, int fd)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {(void *)text, strlen(text)};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control.space;
        message.msg_controllen = sizeof control.space;
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    }
    if (sendmsg(worker_socket, &message, MSG_NOSIGNAL) < 0)
        _exit(0); /* the worker is gone */
}

/* The next message, its last byte NUL. Returns its size; 0 when the worker is gone. */
static size_t receive(char *data, struct request *request)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(FDS_MAX * sizeof(int))];
    } control;
    struct iovec part = {data, MESSAGE_MAX};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space,
                             .msg_controllen = sizeof control.space};
    ssize_t size = recvmsg(worker_socket, &message, MSG_CMSG_CLOEXEC);
    request->fd_count = 0;
    if (size <= 0)
        return 0;
    for (struct cmsghdr *at = CMSG_FIRSTHDR(&message); at; at = CMSG_NXTHDR(&message, at))
        if (at->cmsg_level == SOL_SOCKET && at->cmsg_type == SCM_RIGHTS) {
            request->fd_count = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(request->fds, CMSG_DATA(at), request->fd_count * sizeof(int));
        }
    if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
        data[size - 1] = 1; /* which no parser takes */
    return size;
}

static void start(char **words, size_t count, struct request *request, const int *life)
{
    char text[64];
    int pidfd = -1;
    struct clone_arguments how = {.flags = NAMESPACES | CLONE_PIDFD, .exit_signal = SIGCHLD,
                                  .pidfd = (uint64_t)(uintptr_t)&pidfd};
    if (parse(words, count, request) < 0) {
        snprintf(text, sizeof text, "F %d", EPROTO);
        answer(text, -1);
    } else {
        pid_t pid = syscall(SYS_CLONE3, &how, sizeof how);
        if (pid == 0)
            become_sandbox(request, life);
        snprintf(text, sizeof text, pid < 0 ? "F %d" : "S %d", pid < 0 ? errno : pid);
        answer(text, pid < 0 ? -1 : pidfd);
        if (pid > 0)
            close(pidfd);
    }
    for (int i = 0; i < request->fd_count; i++)
        close(request->fds[i]);
}

static void wait_for_children(void)
{
    char text[64];
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        snprintf(text, sizeof text, "X %d %d", pid, status);
        answer(text, -1);
    }
}

/* User and mount namespace, and the root that all sandboxes get a copy of. */
static void set_up(char *data)
{
    static char *words[STRINGS_MAX];
    struct request unused;
    size_t size;
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS |
                CLONE_NEWCGROUP) < 0)
        fail("user namespace");
    prctl(PR_SET_DUMPABLE, 1); /* for the worker, who writes the maps */
    answer("U " DIGEST, -1);
    size = receive(data, &unused);
    if (size == 0)
        _exit(0);
    umask(022);
    /* Nothing that is mounted here reaches the machine. The new root covers /tmp until it is the
     * root; then the whole machine is at /old, until the setup is done. */
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        fail("make mounts private");
    mount_new("tmpfs", "/tmp", MS_NOSUID | MS_NODEV, "mode=755,size=1m");
    if (chdir("/tmp") < 0 || mkdir("old", 0755) < 0 || mkdir("proc", 0755) < 0 ||
        mkdir("root", 0755) < 0 || syscall(SYS_pivot_root, ".", "old") < 0 || chdir("/") < 0)
        fail("new root");
    /* A sandbox's /proc can be mounted only where another one is seen: this, beside its root. */
    attach(open_source("/proc", 0), "proc");
    mount_new("tmpfs", "root", MS_NOSUID | MS_NODEV, "mode=755,size=1m");
    size_t count = split(data, size, words);
    if (count == 0)
        errno = EPROTO, fail("setup");
    operate(words, count, NULL, 0, 0);
    if (umount2("old", MNT_DETACH) < 0 || rmdir("old") < 0)
        fail("umount the old root");
    proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (proc_fd < 0)
        fail("open /proc");
}

static void read_filter(int fd)
{
    static struct sock_filter code[FILTER_MAX];
    ssize_t size = read(fd, code, sizeof code);
    if (size <= 0 || size % sizeof *code) {
        errno = EINVAL;
        fail("filter");
    }
    filter.len = size / sizeof *code;
    filter.filter = code;
    close(fd);
}

int main(int argc, char **argv)
{
    static char data[MESSAGE_MAX];
    static char *words[STRINGS_MAX];
    struct request request;
    int life[2];
    sigset_t children;

    if (argc != 4)
        return 2;
    worker_socket = atoi(argv[1]);
    if (fcntl(worker_socket, F_SETFD, FD_CLOEXEC) < 0)
        return 2;
    if (geteuid() == 0) {
        errno = EPERM;
        fail("not as root");
    }
    read_filter(atoi(argv[2]));
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_BLOCK, &children, NULL);
    signal(SIGPIPE, SIG_IGN);
    int signals = signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals < 0 || pipe2(life, O_CLOEXEC) < 0)
        fail("signalfd");
    set_up(data);
    /* After the changes of identity, which clear it. The worker that died before has closed the
     * socket, at which the loop below ends. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
        fail("parent death signal");
    answer("R", -1);

    struct pollfd ready[2] = {{.fd = worker_socket, .events = POLLIN},
                              {.fd = signals, .events = POLLIN}};
    for (;;) {
        if (poll(ready, 2, -1) < 0 && errno != EINTR)
            return 1;
        if (ready[1].revents) {
            struct signalfd_siginfo what;
            while (read(signals, &what, sizeof what) > 0)
                ;
            wait_for_children();
        }
        if (ready[0].revents) {
            size_t size = receive(data, &request);
            if (size == 0)
                return 0; /* and PDEATHSIG ends every sandbox */
            start(words, split(data, size, words), &request, life);
        }
    }
}
